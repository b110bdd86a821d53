"""Hugging Face Trainer: a small random GPT-2 on two ranks with DDP, its gradients compressed.

    torchrun --standalone --nproc-per-node 2 examples/trainer_ddp.py

`Compression` is all that compression takes, in any script with a Trainer.
"""

import json
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import shardlab

VOCABULARY, LENGTH = 100, 64


class Compression(TrainerCallback):
    """Compresses the communication of a Trainer, and prints what it saved.

    Args:
        trainer: the callback is added to it. It wraps its model when training begins.
        options: of `shardlab.attach`.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self.trainer, self.options = trainer, options
        trainer.add_callback(self)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Attach to the wrapped model, which callbacks are not given."""
        self.handle = shardlab.attach(self.trainer.model_wrapped, **self.options)

    def on_train_end(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        """Print what was saved."""
        if args.process_index == 0:
            print(self.handle)


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Texts that count on from a number, which can be learned."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (7 * index + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
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
            logging_steps=5,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
            ddp_backend=None if torch.accelerator.is_available() else "gloo",
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Numbers())
        compression = Compression(trainer, gradients="int8:group=64", error_feedback=True)
        trainer.train()
        if arguments.process_index == 0:
            print(json.dumps(compression.handle.ledger.summary()))


if __name__ == "__main__":
    main()
