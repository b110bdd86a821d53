"""Perplexity and bits per byte over a whole split."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from shardlab.core.progress import track
from shardlab.data.tokens.loader import blocks
from shardlab.data.tokens.tokens import TokenSplit


class Quality(NamedTuple):
    """How well a model predicts a text."""

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
    """Quality over every token of `split` but its first, in windows of `sequence_length`.

    A token sees at most the tokens before it in its own window.
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
