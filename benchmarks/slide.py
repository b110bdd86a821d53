"""How much of what the slide engine copies and updates hides behind computation.

    python -m benchmarks.slide [--world-size W] [--layers L] [--width H] [--tokens T] [--clip]
                               [--share S ...] [--steps N] [--out FILE]

The device is the CPU, whose copies take as long as on a link of a certain rate: one on which the
parameters of a step take S times as long as the computation does. The bound of a step is the
longest of computation, copies in, copies out and updates, each alone, and before it the way of the
first unit in and after it that of the last one out and its update; sequential is the sum of all.
Efficiency is 1 - (step - bound) / (sequential - bound). What is exposed is the time for which the
training thread waits.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.children import on_ranks
from shardlab.core.files import write_json
from shardlab.core.host import describe_host, git_revision
from shardlab.core.progress import say
from shardlab.core.strategy import parse_strategy
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.computation import prepare
from shardlab.engines.slide.copies import ThrottledCopies
from shardlab.engines.slide.engine import SlideEngine
from shardlab.models.presets import Shape, shape_config
from shardlab.models.weights import RandomWeights
from shardlab.report.numbers import figure
from shardlab.report.tables import text_table

_VOCABULARY, _SEQUENCE, _UNTIMED, _CPU = 512, 64, 2, torch.device("cpu")


class CountedCopies(ThrottledCopies):
    """Adds up how long copies of each lane take, waits in the lane not included."""

    def __init__(self, gigabytes_per_s: float | None) -> None:
        super().__init__(gigabytes_per_s)
        self.bytes = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Counts."""
        self.bytes += source.nbytes
        super().copy(target, source)


class Waits:
    """The time that the training thread spends in some calls, by what it waits for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, method: str, what: str) -> None:
        """Measures a method of an object from now on."""
        call: Callable[..., Any] = getattr(owner, method)

        def measured(*args: Any) -> Any:
            with self._measuring(what):
                return call(*args)

        setattr(owner, method, measured)

    @contextmanager
    def _measuring(self, what: str) -> Any:
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


def main() -> None:
    """Prints a line per share, and writes everything to a file."""
    options = _options()
    rows = []
    for share in options.share:
        found = on_ranks(options.world_size, partial(_measure, options, share))
        rows.append({"share": share, **found[0]})
        say(f"share {share}: efficiency {rows[-1]['efficiency']:.3f}")
    body = [[figure(value) for value in row.values()] for row in rows]
    print(text_table("The slide engine over throttled copies", [*rows[0]], body).markdown())
    if options.out is not None:
        setting = {key: str(value) for key, value in vars(options).items()}
        about = {"revision": git_revision(), "host": describe_host(), "options": setting}
        write_json(options.out, {**about, "rows": rows})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of a rank and step")
    parser.add_argument("--clip", action="store_true", help="updates beside the next forward pass")
    parser.add_argument("--share", type=float, nargs="+", default=[0.5, 0.9, 1.5])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _measure(options: argparse.Namespace, share: float, group: dist.ProcessGroup) -> dict[str, Any]:
    computing_s = _computing(options, group)
    free = CountedCopies(None)
    engine = _engine(options, group, free)
    _steps(engine, options, 2)
    free.bytes = 0
    _steps(engine, options, 2)
    both = free.bytes / 2
    parameters = sum(unit.size for unit in engine.units) * 4
    inward = both - parameters
    rate = inward / (share * computing_s)
    copies = CountedCopies(rate / 1e9)
    engine = _engine(options, group, copies)
    updating = Waits()
    updating.around(engine._updates, "_update", "update")
    updating.around(engine._updates, "_land", "land")
    _steps(engine, options, _UNTIMED)
    engine.synchronize()
    waits = _exposed(engine)
    updating.seconds.clear()
    seconds = _steps(engine, options, options.steps)
    engine.synchronize()
    updates = updating.seconds["update"] / options.steps
    parts = {
        "compute": computing_s,
        "in": inward / rate,
        "out": parameters / rate,
        "update": updates,
    }
    root = engine.units[0].size * 4 / rate
    ends = 2 * root + updates * engine.units[0].size * 4 / parameters
    bound, sequential = max(parts.values()) + ends, sum(parts.values())
    step = statistics.median(seconds)
    return {
        **{f"{name}_ms": value * 1e3 for name, value in parts.items()},
        "bound_ms": bound * 1e3,
        "step_ms": step * 1e3,
        "sequential_ms": sequential * 1e3,
        "efficiency": 1 - (step - bound) / (sequential - bound),
        **{
            f"exposed_{name}_ms": waits.seconds.get(name, 0.0) / options.steps * 1e3
            for name in ("in", "out", "landing")
        },
    }


def _exposed(engine: SlideEngine) -> Waits:
    waits, schedule = Waits(), engine._schedule
    waits.around(schedule, "_wait", "in")
    waits.around(schedule._departures, "_settle", "out")
    waits.around(engine._updates, "squares", "landing")
    return waits


def _computing(options: argparse.Namespace, group: dist.ProcessGroup) -> float:
    """Seconds of forward and backward where all parameters are on the device."""
    model, weights = _model(options)
    engine = build_engine(
        model,
        parse_strategy({"engine": "ddp"}),
        Optimization(0.1, None),
        dist.new_group([dist.get_rank(group)], use_local_synchronization=True),
        weights=weights,
    )
    seconds = []
    for number in range(_UNTIMED + options.steps):
        start = time.perf_counter()
        engine._accumulate(_batch(options), 1)  # type: ignore[attr-defined]
        if number >= _UNTIMED:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _steps(engine: SlideEngine, options: argparse.Namespace, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        engine.step([_batch(options)], 1e-4)
        seconds.append(time.perf_counter() - start)
    return seconds


def _batch(options: argparse.Namespace) -> Tensor:
    return torch.randint(_VOCABULARY, (options.tokens // _SEQUENCE, _SEQUENCE + 1))


def _model(options: argparse.Namespace) -> tuple[Any, RandomWeights]:
    config = shape_config(Shape(options.layers, options.width, 4), _VOCABULARY, _SEQUENCE, 0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, RandomWeights(model, 0)


def _engine(
    options: argparse.Namespace, group: dist.ProcessGroup, copies: ThrottledCopies
) -> SlideEngine:
    model, weights = _model(options)
    full = parse_strategy({"engine": "slide"}).normal()
    prepare(model, full)
    names = {module: name for name, module in model.named_modules()}
    return SlideEngine(
        *(model, full, Optimization(0.1, 1.0 if options.clip else None), group, 0, _CPU),
        lambda module: weights.materialize(module, names[module]),
        copies,
    )


if __name__ == "__main__":
    main()
