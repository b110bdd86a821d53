"""A step of Adam on the CPU: our kernel, torch's and DeepSpeed's.

    python -m benchmarks.adam [--elements 16 64 256] [--threads 1 2] [--repetitions R]
                              [--rivals FOLDER] [--out FOLDER]

All ways take turns, and the fastest repetition of each counts. The mixed step takes gradients of
bfloat16 and leaves a copy of the parameters in bfloat16; torch's needs a cast before and after its
fused step. The summed step takes those of several ranks, as torch's does by add, divide, step and
copy.
DeepSpeedCPUAdam is measured where `make rivals` has installed it; it compiles itself at its first
use.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.common import RIVAL_PACKAGES, arguments, best_times, publish, text_table
from shardlab.core.numbers import figure
from shardlab.kernels.adam import Hyper, adam_
from shardlab.kernels.workers import Workers

RANKS = (2, 4)
HYPER = Hyper(1e-3, weight_decay=0.1)
STEP = 10
MILLION = 1 << 20


class Vectors:
    """Vectors of the steps: float32 [n], but gradients and mirror bfloat16."""

    def __init__(self, n: int) -> None:
        self.parameter, self.gradient = torch.randn(n), torch.randn(n)
        self.exp_avg, self.exp_avg_sq = torch.randn(n), torch.rand(n)
        self.narrow = [self.gradient.bfloat16() for _ in range(max(RANKS))]
        self.mirror = self.parameter.bfloat16()
        self.theirs = nn.Parameter(self.parameter.clone())
        self.theirs.grad = self.gradient

    def ours(self, gradients: list[Tensor], workers: Workers, mirror: Tensor | None = None) -> None:
        """Run our step on these vectors."""
        moments, scale = (self.exp_avg, self.exp_avg_sq), 1 / len(gradients)
        adam_(self.parameter, *moments, gradients, HYPER, STEP, scale, mirror, workers=workers)


def calls(vectors: Vectors, workers: Workers) -> dict[str, Callable[[], object]]:
    """Return every implementation by name; `torch ...` is compared with the name without it."""
    rate, decay = HYPER.learning_rate, HYPER.weight_decay
    optimizer = torch.optim.AdamW([vectors.theirs], rate, weight_decay=decay, fused=True)
    optimizer.state[vectors.theirs] = {
        "step": torch.tensor(STEP - 1.0),
        "exp_avg": vectors.exp_avg.clone(),
        "exp_avg_sq": vectors.exp_avg_sq.clone(),
    }
    gradient, theirs, mirror = vectors.gradient, vectors.theirs.detach(), vectors.mirror

    def torch_mixed() -> None:
        gradient.copy_(vectors.narrow[0])
        optimizer.step()
        mirror.copy_(theirs)

    def torch_summed(ranks: int) -> None:
        gradient.zero_()
        for other in vectors.narrow[:ranks]:
            gradient.add_(other)
        gradient.div_(ranks)
        optimizer.step()
        mirror.copy_(theirs)

    ways: dict[str, Callable[[], object]] = {
        "torch float32": optimizer.step,
        "float32": lambda: vectors.ours([gradient], workers),
        "torch mixed": torch_mixed,
        "mixed": lambda: vectors.ours(vectors.narrow[:1], workers, mirror),
    }
    for ranks in RANKS:
        ways[f"torch sum of {ranks}"] = partial(torch_summed, ranks)
        ways[f"sum of {ranks}"] = partial(vectors.ours, vectors.narrow[:ranks], workers, mirror)
    if find_spec("deepspeed"):
        deepspeed = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        ways["DeepSpeed float32"] = deepspeed([vectors.theirs], rate, weight_decay=decay).step
    return ways


def main() -> None:
    args = arguments(
        __doc__,
        elements=([16.0, 64.0, 256.0], "x 2**20"),
        threads=[1, 2],
        repetitions=8,
        rivals=RIVAL_PACKAGES,
    )
    sys.path.append(str(args.rivals))
    rates: dict[str, dict[str, float]] = {}
    for size in args.elements:
        n = int(size * MILLION)
        vectors = Vectors(n)
        for threads in args.threads:
            workers = Workers(threads)
            seconds = best_times(calls(vectors, workers), args.repetitions, threads)
            workers.close()
            rates[f"{size:g}M, {threads}"] = {way: n / best for way, best in seconds.items()}
    ways = next(iter(rates.values()))
    rows = [[way, *(cell(way, column) for column in rates.values())] for way in ways]
    publish(
        __doc__,
        args.out / "adam.md",
        text_table("Million elements per second", ["elements, threads", *rates], rows),
        "With x: ratio to torch.",
    )


def cell(way: str, rates: dict[str, float]) -> str:
    """Return the rate of a way, and its ratio to what it is compared with."""
    text = figure(rates[way] / 1e6)
    other = f"torch {way.removeprefix('DeepSpeed ')}"
    return text + f" {rates[way] / rates[other]:.2f}x" if other in rates else text


if __name__ == "__main__":
    main()
