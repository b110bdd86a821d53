"""Hugging Face Trainer: a small random GPT-2 on two ranks with DDP, which compress gradients.

    torchrun --standalone --nproc-per-node 2 examples/trainer_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/trainer_ddp.py --sync-every 8

With the option, the replicas synchronise parameters in every eighth step alone. The line that makes
a `CompressionCallback` is all that either takes, in any script with a Trainer. Trackers that you
name in `report_to`, such as `"wandb"`, get its metrics with the loss; here they are printed.
"""

import argparse
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from shardlab.hf import CompressionCallback

VOCABULARY, LENGTH = 100, 64


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Texts that count on from a number, which can be learned."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (7 * index + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sync-every", type=int, help="steps between synchronisations")
    every = parser.parse_args().sync_every
    options: dict[str, Any] = {"gradients": {"codec": "int8:group=64", "error_feedback": True}}
    if every is not None:
        options = {"sync": {"every": every, "codec": "int8"}}
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
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            max_steps=20,
            learning_rate=3e-3,
            logging_steps=4,
            # at multiples of `every`, where all replicas are equal
            eval_strategy="steps",
            eval_steps=every or 8,
            save_steps=every or 8,
            load_best_model_at_end=True,
            ddp_find_unused_parameters=False,
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
            ddp_backend=None if torch.accelerator.is_available() else "gloo",
        )
        data = Numbers()
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, eval_dataset=data)
        callback = CompressionCallback(trainer, **options)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        if arguments.process_index == 0:
            print(callback.handle)
            print(f"loss of the best model {loss:.3f}")


if __name__ == "__main__":
    main()
