"""Real gradients of a GPT-2 in training, stored in a file.

A model of 17 M parameters takes 40 AdamW steps on the tokens of the pipeline. Then gradients are
recorded, all at the same weights. Benchmarks that need the file write it when it is absent, or when
the tokens or the recipe have changed: a minute on two cores.
"""

import hashlib
import os
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel

from benchmarks.common import on_ranks
from shardlab.codecs.base import Block, Unit
from shardlab.core.errors import UserError
from shardlab.core.files import atomic
from shardlab.core.progress import say, track
from shardlab.data.loader import Batches
from shardlab.data.tokens import TokenSplit, open_split
from shardlab.models.build import shape_config
from shardlab.models.settings import Shape

RANKS = 8
_SHAPE = Shape(5, 512, 8)
_ROWS = 2048
"""of the embedding; with them `ranks` has 4 Mi and `large` 16 Mi elements"""
_WARM_UP, _RATE, _CLIP = 10, 1e-3, 1.0
_TRAINED, _BATCH, _LENGTH, _SEED = 40, 8, 64, 0
_RECIPE = (
    f"shape {tuple(_SHAPE)}, {_TRAINED} steps of AdamW at {_RATE}, batches of {_BATCH} x "
    f"{_LENGTH}, seed {_SEED}, 2 x {RANKS} ranks"
)
UNIT = Unit(
    "gradient",
    (
        Block("wte", _ROWS, 512),
        Block("h.0.attn.c_attn", 512, 1536),
        Block("h.0.attn.c_proj", 512, 512),
        Block("h.0.mlp.c_fc", 512, 2048),
        Block("h.0.mlp.c_proj", 2048, 512),
    ),
)
"""blocks of a row of `ranks`"""


class RecordedGradients(NamedTuple):
    """Recorded gradients, float32."""

    before: Tensor
    """[8, 4 Mi]: of a batch each, of the token embedding and the matrices of the first block"""
    ranks: Tensor
    """the same of other batches"""
    large: Tensor
    """[16 Mi]: of one batch, of all matrices"""


def load_gradients(data: Path, work: Path) -> RecordedGradients:
    """Return the gradients of a file in `work`, computed from the tokens in `data` if absent.

    A child process computes it: this one stays free of threads, so that it can fork ranks.

    Raises:
        UserError: no tokens, or too small a vocabulary.
    """
    manifest = data / "tokens" / "manifest.json"
    if not manifest.is_file():
        raise UserError(f"{manifest}: no such file: name the pipeline's data folder by --data")
    digest = hashlib.sha256(_RECIPE.encode() + manifest.read_bytes()).hexdigest()
    path = work / f"gradients-{digest[:12]}.safetensors"
    if not path.is_file():
        say(f"benchmarks: making {path} ({_RECIPE})")
        split = open_split(data / "tokens", "train")
        on_ranks(1, lambda _: _record(split, path), threads=os.cpu_count() or 1)
    return RecordedGradients(**load_file(path))


def _record(split: TokenSplit, path: Path) -> None:
    if split.vocabulary < _ROWS:
        raise UserError(f"tokenize.vocabulary: {split.vocabulary}; the benchmarks need {_ROWS}")
    torch.manual_seed(_SEED)
    config = shape_config(_SHAPE, split.vocabulary, _LENGTH, split.end_of_text)
    model, batches, batch_numbers = GPT2LMHeadModel(config), Batches(split, _LENGTH, _SEED), count()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def backward() -> dict[str, Tensor]:
        """Return the gradient of the next batch by matrix; of the embedding `_ROWS` rows."""
        model.zero_grad()
        batch = batches.batch(_BATCH * next(batch_numbers), _BATCH)
        logits = model(input_ids=batch[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        matrices = {n: m for n, m in gradients.items() if m.dim() == 2 and "wpe" not in n}
        return {n: m[:_ROWS] if "wte" in n else m for n, m in matrices.items()}

    for step in track(range(_TRAINED), "train", unit="step"):
        backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP)
        optimizer.step()
    vectors = []
    for _ in track(range(2 * RANKS), "ranks", unit="rank"):
        matrices = backward()
        vectors.append(_joined([m for n, m in matrices.items() if "wte" in n or ".h.0." in n]))
    tensors = {
        "before": torch.stack(vectors[:RANKS]),
        "ranks": torch.stack(vectors[RANKS:]),
        "large": _joined([*matrices.values()]),
    }
    with atomic(path) as temporary:
        save_file(tensors, temporary)


def _joined(matrices: list[Tensor]) -> Tensor:
    return torch.cat([matrix.flatten() for matrix in matrices])
