"""Real gradients for the benchmarks, of a GPT-2 in training, stored in a file.

A model of 17 M parameters takes 40 AdamW steps on the tokens of the pipeline. Then these are
recorded:

- `before` and `ranks`, float32 [8, 4 Mi]: gradients of 8 different batches each, all at the same
  weights, of the token embedding and the matrices of the first block;
- `large`, float32 [16 Mi]: the gradient of one batch, of all matrices;
- `steps`, float32 [24, 4, 1 Mi]: gradients of 4 batches in each of 24 further steps, of every
  fourth row of the matrices of `ranks`.

    python -m benchmarks.gradients [--data FOLDER] [--work FOLDER]

The file is written once, in about two minutes on two cores, and again when the tokens or the recipe
change. Every other benchmark reads it, or writes it when it is absent.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from benchmarks.common import DATA, WORK, arguments, on_ranks
from shardlab.codecs.base import Block, Unit
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, sha256_of_file
from shardlab.core.progress import say, stopwatch, track
from shardlab.data.loader import Batches
from shardlab.data.tokens import TokenSplit, open_split
from shardlab.models.build import Shape, shape_config

RANKS, SENDERS, STEPS = 8, 4, 24
EVERY = 4
"""of the rows of a matrix, one in so many is in `steps`"""
_SHAPE = Shape(5, 512, 8)
_ROWS = 2048
"""of the embedding; with them `ranks` has 4 Mi and `large` 16 Mi elements"""
_WARM_UP, _RATE, _DECAY, _CLIP = 10, 1e-3, 0.1, 1.0
_TRAINED, _BATCH, _LENGTH, _SEED = 40, 8, 64, 0
VECTORS = ("before", "ranks", "large", "steps")
RECIPE = (
    f"shape {tuple(_SHAPE)}, {_TRAINED} steps of AdamW at {_RATE}, batches of {_BATCH} x "
    f"{_LENGTH}, seed {_SEED}, 2 x {RANKS} ranks, {STEPS} steps of {SENDERS} ranks, every "
    f"{EVERY}th row"
)


class Gradients:
    """Vectors of a file, each read when it is first accessed, and their blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        described = _described(path)
        self.unit, self.large_unit, self.small_unit = (
            Unit(name, tuple(Block(*block) for block in json.loads(described[name])))
            for name in ("unit", "large_unit", "small_unit")
        )
        """of a row of `before` and `ranks`, of `large`, and of a row of `steps`"""

    def __getattr__(self, name: str) -> Tensor:
        """Read one of `VECTORS`."""
        if name not in VECTORS:
            raise AttributeError(name)
        with safe_open(self._path, framework="pt") as file:
            vector: Tensor = file.get_tensor(name)
        setattr(self, name, vector)
        return vector


def prepare(data: Path, work: Path) -> Path:
    """Return the file in `work`, computed from the tokens in `data` if it is absent.

    A child process computes it: this one stays free of threads, so that it can fork ranks.

    Raises:
        UserError: no tokens, or too small a vocabulary.
    """
    path = work / "gradients.safetensors"
    manifest = data / "tokens" / "manifest.json"
    if not manifest.is_file():
        raise UserError(f"{manifest}: no such file: name the pipeline's data folder by --data")
    recipe = f"{RECIPE}; tokens {sha256_of_file(manifest)}"
    if not path.is_file() or _described(path)["recipe"] != recipe:
        say(f"benchmarks: making {path} ({RECIPE})")
        split = open_split(data / "tokens", "train")
        on_ranks(1, lambda _: _make(split, recipe, path), threads=os.cpu_count() or 1)
    return path


def statistics(gradients: Gradients) -> dict[str, float]:
    """Return statistics on which the errors of codecs depend.

    Kurtosis of a vector, mean cosine between the vectors of two ranks, and |sum of the mean
    gradients of all steps| / sum of their norms: 1 if all agree, 1 / sqrt(24) = 0.20 if none does.
    """
    ranks = gradients.ranks.double()
    first = ranks[0]
    kurtosis = float(first.sub(first.mean()).pow(4).mean() / first.var(correction=0).square())
    unit = F.normalize(ranks, dim=1)
    cosines = (unit @ unit.T)[*torch.triu_indices(len(ranks), len(ranks), 1)]
    means = gradients.steps.mean(1).double()
    return {
        "kurtosis": kurtosis,
        "cosine between ranks": float(cosines.mean()),
        "coherence of steps": float(means.sum(0).norm() / means.norm(dim=1).sum()),
    }


def _described(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


class _Training:
    """Model in training, with access to its gradients."""

    def __init__(self, split: TokenSplit) -> None:
        torch.manual_seed(_SEED)
        config = shape_config(_SHAPE, split.vocabulary, _LENGTH, split.end_of_text)
        self.model = GPT2LMHeadModel(config)
        self._batches = Batches(split, _LENGTH, _SEED)
        self._sample = 0
        self._step = 0
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=_DECAY, fused=True
        )

    def backward(self) -> float:
        """Accumulate the gradient of the next batch; return its loss."""
        batch = self._batches.batch(self._sample, _BATCH)
        self._sample += _BATCH
        logits = self.model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def update(self) -> None:
        """Make one AdamW step with the accumulated gradient."""
        self._step += 1
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, self._step / _WARM_UP)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and gradient of each matrix: rows of the embedding, then block after block."""
        for name, parameter in self.model.named_parameters():
            if parameter.dim() == 2 and "wpe" not in name:
                assert parameter.grad is not None
                yield name, parameter.grad[:_ROWS] if "wte" in name else parameter.grad


def _make(split: TokenSplit, recipe: str, path: Path) -> None:
    if split.vocabulary < _ROWS:
        raise UserError(f"tokenize.vocabulary: {split.vocabulary}; the benchmarks need {_ROWS}")
    seconds = stopwatch()
    training = _Training(split)
    losses = []
    for _ in track(range(_TRAINED), "train", unit="step"):
        losses.append(training.backward())
        training.update()
    vectors = []
    for _ in track(range(2 * RANKS), "ranks", unit="rank"):
        training.model.zero_grad()
        training.backward()
        matrices = {name: gradient.clone() for name, gradient in training.gradients()}
        first = {k: v for k, v in matrices.items() if "wte" in k or ".h.0." in k}
        vectors.append(_joined(first))
    steps = [_one_step(training, set(first)) for _ in track(range(STEPS), "steps", unit="step")]
    units = {
        "unit": _blocks(first),
        "large_unit": _blocks(matrices),
        "small_unit": _blocks({name: matrix[::EVERY] for name, matrix in first.items()}),
    }
    with atomic(path) as temporary:
        tensors = {
            "before": torch.stack(vectors[:RANKS]),
            "ranks": torch.stack(vectors[RANKS:]),
            "large": _joined(matrices),
            "steps": torch.stack(steps),
        }
        save_file(tensors, temporary, {"recipe": recipe, **units})
    say(f"benchmarks: loss {losses[0]:.2f} to {losses[-1]:.2f}; made in {seconds():.0f} s")


def _joined(matrices: dict[str, Tensor]) -> Tensor:
    return torch.cat([matrix.flatten() for matrix in matrices.values()])


def _blocks(matrices: dict[str, Tensor]) -> str:
    return json.dumps([(name, *matrix.shape) for name, matrix in matrices.items()])


def _one_step(training: _Training, names: set[str]) -> Tensor:
    """Train one step on the mean gradient of `SENDERS` batches; return chosen rows of theirs."""
    total: dict[nn.Parameter, Tensor] = {}
    vectors = []
    for _ in range(SENDERS):
        training.model.zero_grad()
        training.backward()
        chosen = {name: m[::EVERY] for name, m in training.gradients() if name in names}
        vectors.append(_joined(chosen))
        for parameter in training.model.parameters():
            assert parameter.grad is not None
            share = parameter.grad / SENDERS
            total[parameter] = total[parameter] + share if parameter in total else share
    for parameter, mean in total.items():
        parameter.grad = mean
    training.update()
    return torch.stack(vectors)


def main() -> None:
    args = arguments(__doc__, data=DATA, work=WORK)
    gradients = Gradients(prepare(args.data, args.work))
    for name in VECTORS:
        print(f"{name}: float32 {list(getattr(gradients, name).shape)}")
    for name, value in statistics(gradients).items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
