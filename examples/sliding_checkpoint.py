"""Activations on disk: a small random GPT-2, whose losses are those of plain training.

    python examples/sliding_checkpoint.py

The lines that end with `# <- shardlab` are all that it takes in addition to checkpointing.
"""

import tempfile
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardlab  # <- shardlab

VOCABULARY, LENGTH = 100, 64


def losses(sliding: AbstractContextManager[Any], steps: int = 10) -> list[float]:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=4,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(steps):
        # the next number, as a text that can be learned
        tokens = (torch.randint(VOCABULARY, (8, 1)) + torch.arange(LENGTH)) % VOCABULARY
        with sliding:  # <- shardlab
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sliding = shardlab.SlidingCheckpoint.on_disk(folder, device="cpu")  # <- shardlab
        on_disk = losses(sliding)
    for step, loss in enumerate(on_disk):
        print(f"step {step}: loss {loss:.3f}")
    assert on_disk == losses(nullcontext()), "the same bits as without"


if __name__ == "__main__":
    main()
