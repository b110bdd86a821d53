"""Accelerate with FSDP2: a small random GPT-2 on two ranks, its communication compressed.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/accelerate_fsdp2.py --logs FOLDER

The lines that end with `# <- shardlab` are all that compression takes. With a folder TensorBoard
shows the loss, and what was sent; any other tracker of Accelerate takes the place of its name.
"""

import argparse
import json

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from transformers import GPT2Config, GPT2LMHeadModel

import shardlab  # <- shardlab

VOCABULARY, LENGTH = 100, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logs", help="folder for TensorBoard")
    logs = parser.parse_args().logs
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        fsdp_plugin=plugin,
        log_with="tensorboard" if logs else None,
        project_dir=logs,
    )
    accelerator.init_trackers("accelerate")
    if accelerator.device.type == "cpu":
        # Accelerate turns to DDP on CPUs, where fully_shard serves as well: ask for it again
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    gradients = {"codec": "int8:group=64", "error_feedback": True}  # <- shardlab
    handle = shardlab.attach(model, gradients, weights="int8")  # <- shardlab

    batches = torch.Generator().manual_seed(accelerator.process_index)
    for step in range(20):
        # the next number, as a text that can be learned
        first = torch.randint(VOCABULARY, (8, 1), generator=batches)
        tokens = (first + torch.arange(LENGTH)) % VOCABULARY
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.3f}")
        accelerator.log({"loss": loss.item()}, step=step)
        accelerator.log(handle.metrics(), step=step)  # <- shardlab

    accelerator.print(json.dumps(handle.ledger.summary()))  # <- shardlab
    accelerator.end_training()


if __name__ == "__main__":
    main()
