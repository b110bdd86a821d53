"""Plain FSDP2: a small random GPT-2 on two ranks, its communication compressed.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

The lines that end with `# <- shardlab` are all that compression takes.
"""

import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import shardlab  # <- shardlab

VOCABULARY, LENGTH = 100, 64


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)


def main() -> None:
    dist.init_process_group("gloo")
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
    model = GPT2LMHeadModel(config)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    gradients = {"codec": "int8:group=64", "error_feedback": True}  # <- shardlab
    handle = shardlab.attach(model, gradients, weights="int8")  # <- shardlab
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    batches = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        # the next number, as a text that can be learned
        first = torch.randint(VOCABULARY, (8, 1), generator=batches)
        tokens = (first + torch.arange(LENGTH)) % VOCABULARY
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step}: loss {loss.item():.3f}")

    say(f"{handle}\n{json.dumps(handle.ledger.summary())}")  # <- shardlab
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
