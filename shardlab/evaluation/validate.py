"""Perplexity and bits per byte of a saved model, and perplexity of the same model untrained."""

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardlab.core.files import write_json
from shardlab.core.progress import track
from shardlab.data.tokens.loader import blocks
from shardlab.data.tokens.tokens import TokenSplit, open_split
from shardlab.evaluation.saved_model import load_model
from shardlab.experiment.schema import Model, Train
from shardlab.launch import launch
from shardlab.models.build import build_model
from shardlab.records.run import Validation

_BATCH = 32
"""sequences per forward pass; it changes no result"""


class Quality(NamedTuple):
    """Quality of a model's predictions of a text."""

    loss: float
    """nats per token, mean over all predicted tokens"""
    tokens: int
    bits_per_byte: float
    """all nats over the bytes of the text; comparable across tokenizers"""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)


@torch.no_grad()
def evaluate(model: nn.Module, split: TokenSplit, sequence_length: int, batch: int) -> Quality:
    """Return the quality over every token of `split` but its first.

    The context of a token is its own window of `sequence_length` tokens.
    """
    model.eval()
    nats, tokens = 0.0, 0
    windows = blocks(split, sequence_length, batch)
    for window in track(windows, "validate", unit="batch"):
        logits = model(input_ids=window[:, :-1]).logits.float()
        targets = window[:, 1:].flatten()
        nats += float(F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"))
        tokens += targets.numel()
    return Quality(nats / tokens, tokens, nats / (math.log(2) * split.text_bytes))


def validate_run(
    final_model: Path, output: Path, train: Train, model: Model, seed: int, data: Path
) -> None:
    """Write the `Validation` of a saved model to `output`.

    A child process does the work: this one stays free of threads, so that it can fork ranks.

    Args:
        model, seed: of the untrained model.
        data: folder that holds tokens/.

    Raises:
        RunFailed: the child process failed.
        UserError: the saved model or the tokens cannot be used.
    """
    worker = partial(_work, final_model, output, train, model, seed, data)
    launch(worker, 1, train.threads, train.timeout_s, placement=train.placement)


def _work(
    final_model: Path,
    output: Path,
    train: Train,
    model: Model,
    seed: int,
    data: Path,
    group: dist.ProcessGroup,
) -> None:
    split = open_split(data / "tokens", "validation")
    length = train.sequence_length
    trained = evaluate(load_model(final_model), split, length, _BATCH)
    built = build_model(model, split.vocabulary, length, split.end_of_text, seed)
    untrained = evaluate(built.whole(), split, length, _BATCH)
    validation = Validation(
        val_loss=trained.loss,
        val_ppl=trained.perplexity,
        val_bits_per_byte=trained.bits_per_byte,
        val_tokens=trained.tokens,
        untrained_ppl=untrained.perplexity,
    )
    write_json(output, validation.model_dump(mode="json"))
