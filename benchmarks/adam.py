"""A step of Adam on the CPU: our kernel, torch's, DeepSpeed's and the limit of memory bandwidth.

    python -m benchmarks.adam [--elements 16 64 256] [--threads 1 2] [--repetitions R]
                              [--work FOLDER] [--rivals FOLDER]

All ways are interleaved; what is shown is the fastest repetition of each. With several
threads a way waits in its turn until no thread of the way before spins, and runs once untimed: the
spinning took up to a third of what followed an operation of torch. The ceiling
touches the memory of a step in float32 (28 bytes an element) with almost no arithmetic. The mixed
step takes gradients of bfloat16 and leaves a copy of the parameters in bfloat16; torch's needs a
cast before and after its fused step. The summed step takes those of several ranks, as torch's does
by add, divide, step and copy. Steps with narrow moments keep both in bfloat16 (20 bytes an element
instead of 28), the second with stochastic rounding. DeepSpeedCPUAdam is measured where `make
rivals` has installed it; it compiles itself at its first use.

At last, how long tiny operations of a thread take while another one updates on all threads.
"""

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.common import RIVAL_PACKAGES, WORK, arguments, write_results
from benchmarks.speed import best_times
from shardlab.codecs import native
from shardlab.codecs.adam import Hyper, adam_, sum_of_squares
from shardlab.codecs.native import INT, POINTER, function
from shardlab.codecs.workers import Workers
from shardlab.report.tables import make_table

RANKS = (2, 4)
HYPER = Hyper(1e-3, weight_decay=0.1)
STEP = 10
MILLION = 1 << 20
Call = Callable[[], object]
_NARROW = ", narrow moments"

_c_traffic = function("adam_traffic", POINTER, POINTER, POINTER, POINTER, POINTER, INT)


class Vectors:
    """Vectors of the steps: float32 [n], but gradients and mirror bfloat16."""

    def __init__(self, n: int) -> None:
        self.parameter, self.gradient = torch.randn(n), torch.randn(n)
        self.exp_avg, self.exp_avg_sq = torch.randn(n), torch.rand(n)
        self.narrow = [self.gradient.bfloat16() for _ in range(max(RANKS))]
        self.moments = self.exp_avg, self.exp_avg_sq
        self.narrow_moments = self.exp_avg.bfloat16(), self.exp_avg_sq.bfloat16()
        self.mirror = self.parameter.bfloat16()
        self.theirs = nn.Parameter(self.parameter.clone())
        self.theirs.grad = self.gradient

    def ours(
        self,
        gradients: list[Tensor],
        workers: Workers,
        mirror: Tensor | None = None,
        narrow: bool = False,
    ) -> None:
        """Run our step on these vectors."""
        moments = self.narrow_moments if narrow else self.moments
        scale = 1 / len(gradients)
        adam_(self.parameter, *moments, gradients, HYPER, STEP, scale, mirror, workers=workers)

    def traffic(self, workers: Workers) -> None:
        """Touch the memory of a step in float32."""
        vectors = self.parameter, self.exp_avg, self.exp_avg_sq, self.gradient
        addresses = [vector.data_ptr() for vector in vectors]
        _c_traffic(workers.handle(), *addresses, self.parameter.numel())


def calls(vectors: Vectors, workers: Workers) -> dict[str, Call]:
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
        for each in vectors.narrow[:ranks]:
            gradient.add_(each)
        gradient.div_(ranks)
        optimizer.step()
        mirror.copy_(theirs)

    ways: dict[str, Call] = {
        "ceiling": lambda: vectors.traffic(workers),
        "torch float32": optimizer.step,
        "float32": lambda: vectors.ours([gradient], workers),
        "torch mixed": torch_mixed,
        "mixed": lambda: vectors.ours(vectors.narrow[:1], workers, mirror),
        "float32, narrow moments": lambda: vectors.ours([gradient], workers, narrow=True),
        "mixed, narrow moments": lambda: vectors.ours(vectors.narrow[:1], workers, mirror, True),
    }
    for ranks in RANKS:
        ways[f"torch sum of {ranks}"] = partial(torch_summed, ranks)
        ways[f"sum of {ranks}"] = partial(vectors.ours, vectors.narrow[:ranks], workers, mirror)
    ways["sum of squares"] = lambda: sum_of_squares(vectors.narrow[:1], workers=workers)
    if find_spec("deepspeed"):
        deepspeed = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        ways["DeepSpeed float32"] = deepspeed([vectors.theirs], rate, weight_decay=decay).step
    return ways


def delays(n: int, threads: int) -> list[float]:
    """Return ascending seconds of tiny operations while updates of n elements run in the
    background."""
    vectors, workers, over = Vectors(n), Workers(threads), threading.Event()

    def update() -> None:
        for _ in range(50):
            vectors.ours(vectors.narrow[:1], workers, vectors.mirror)
        over.set()

    background, found, tiny = threading.Thread(target=update), [], torch.ones(8)
    background.start()
    while not over.is_set():
        start = time.perf_counter()
        tiny.add(1)
        found.append(time.perf_counter() - start)
    background.join()
    return sorted(found)


def main() -> None:
    args = arguments(
        __doc__,
        elements=([16.0, 64.0, 256.0], "x 2**20"),
        threads=[1, 2],
        repetitions=8,
        work=WORK,
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
    waits = delays(int(min(args.elements) * MILLION), max(args.threads))
    percentile = waits[int(0.99 * len(waits))]
    write_results(
        args.work / "adam.json",
        compiled=native.available(),
        elements_per_s=rates,
        tiny_operation_s={"p99": percentile, "most": waits[-1], "count": len(waits)},
    )
    print(_table(rates))
    print(
        f"\n{len(waits)} tiny operations during updates: 99 % within {percentile * 1e3:.3f} ms, "
        f"the longest {waits[-1] * 1e3:.1f} ms"
    )


def _table(rates: dict[str, dict[str, float]]) -> str:
    ways = list(next(iter(rates.values())))
    rows = [[way, *(_cell(way, columns) for columns in rates.values())] for way in ways]
    title = (
        "million elements per second (and share of the ceiling, or ratio to torch; of narrow "
        "moments to wide ones)"
    )
    table = make_table(title, ["elements, threads", *rates], rows, layout="text")
    return f"{title}\n\n{table.markdown()}"


def _cell(way: str, of: dict[str, float]) -> str:
    shown = f"{of[way] / 1e6:.0f}"
    if way == "float32":
        shown += f" ({of[way] / of['ceiling']:.2f})"
    other = f"torch {way.removeprefix('DeepSpeed ')}"
    if way.endswith(_NARROW):
        other = way.removesuffix(_NARROW)
    return shown + f" {of[way] / of[other]:.2f}x" if other in of else shown


if __name__ == "__main__":
    main()
