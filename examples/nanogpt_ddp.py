"""The loop of nanoGPT on two ranks, replicas that synchronise every eighth step alone.

    torchrun --standalone --nproc-per-node 2 examples/nanogpt_ddp.py

For a slow link between the ranks: in the other seven steps nothing is sent. The lines that end with
`# <- shardlab` are all that it takes.
"""

import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import shardlab  # <- shardlab

VOCABULARY, LENGTH = 100, 64
ACCUMULATION, STEPS = 2, 40


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    raw_model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    model = DistributedDataParallel(raw_model)
    sync = {"every": 8, "codec": "int4:group=128", "error_feedback": True}  # <- shardlab
    handle = shardlab.attach(model, sync=sync, optimizer=optimizer)  # <- shardlab

    batches = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        for micro_step in range(ACCUMULATION):
            model.require_backward_grad_sync = micro_step == ACCUMULATION - 1
            # the next number, as a text that can be learned
            first = torch.randint(VOCABULARY, (4, 1), generator=batches)
            tokens = (first + torch.arange(LENGTH)) % VOCABULARY
            loss = model(input_ids=tokens, labels=tokens).loss / ACCUMULATION
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"step {step}: loss {ACCUMULATION * loss.item():.3f}")

    handle.synchronize()  # <- shardlab
    if rank == 0:
        print(f"{handle}\n{json.dumps(handle.ledger.summary())}")  # <- shardlab
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
