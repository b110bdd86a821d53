"""Overlap of the slide engine's copies and updates with computation.

    python -m benchmarks.slide [--world-size W] [--layers L] [--width H] [--tokens T] [--window K]
                               [--clip] [--share S ...] [--repetitions R] [--out FILE]

The device is the CPU, whose copies take as long as on a link of a certain rate: one on which the
parameters of a step take S times as long as the computation does. Steps take turns with the same
computation where all parameters are in place, so that both see the same machine.

The bound of a step is the longest of computation, copies in, copies out and updates, each with
what nothing hides: before it the way in of the root and the first unit, after it their way out and
their update. `phases` is the sum of such bounds of forward and of backward, as no unit of the next
forward pass can come before it is updated. Sequential is the sum of all. Efficiency is
1 - (step - bound) / (sequential - bound). What is exposed is the time for which the training thread
waits.
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
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import arguments, on_ranks, print_table, write_results
from shardlab.config.strategy import parse_strategy
from shardlab.core.progress import say
from shardlab.engines.base import EngineSetup, Optimization
from shardlab.engines.slide import SlideEngine
from shardlab.engines.slide_transfers import Copies
from shardlab.models.build import Shape, shape_config
from shardlab.models.units import prepare
from shardlab.models.weights import RandomWeights
from shardlab.report.tables import figure

_VOCABULARY, _SEQUENCE, _UNTIMED, _IN_A_ROW, _CPU = 512, 64, 2, 6, torch.device("cpu")
_WAITS = ("in", "out", "landing")


class ThrottledCopies(Copies):
    """Copies for a CPU as the device, at a rate that makes overlap visible."""

    def __init__(self, gigabytes_per_s: float = float("inf")) -> None:
        super().__init__(_CPU)
        self._seconds_per_byte = 1e-9 / gigabytes_per_s

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a vector, and wait as long as a link of that rate takes."""
        end = time.perf_counter() + source.nbytes * self._seconds_per_byte
        super().copy(target, source)
        if (left := end - time.perf_counter()) > 0:
            time.sleep(left)


class Waits:
    """Time that the training thread spends in some calls, by what it waits for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, method: str, what: str) -> None:
        """Measure a method of an object from now on."""
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
    options = arguments(
        __doc__,
        world_size=1,
        layers=12,
        width=256,
        tokens=(1024, "of a rank and step"),
        window=2,
        clip=(False, "updates overlap with forward"),
        share=[0.3, 0.6, 0.9, 1.5],
        repetitions=3,
        out=Path(".work/benchmarks/slide.json"),
    )
    rows = []
    for share in options.share:
        found = on_ranks(options.world_size, partial(_measure, options, share))
        rows.append({"share": share, **found[0]})
        say(f"share {share}: efficiency {rows[-1]['efficiency']:.3f}")
    body = [[figure(value) for value in row.values()] for row in rows]
    print_table("The slide engine over throttled copies", [*rows[0]], body)
    setting = {key: str(value) for key, value in vars(options).items()}
    write_results(options.out, options=setting, rows=rows)


def _measure(options: argparse.Namespace, share: float, group: dist.ProcessGroup) -> dict[str, Any]:
    plain = _Plain(options)
    for _ in range(_UNTIMED):
        plain.step()
    compute_s = statistics.median(sum(plain.step()) for _ in range(options.repetitions))
    root, unit, layers = _bytes(options, group)
    inward = [root + layers * unit, (layers - options.window) * unit]
    rate = sum(inward) / (share * compute_s)
    engine = _engine(options, group, ThrottledCopies(rate / 1e9))
    for _ in range(_UNTIMED):
        engine.step([_batch(options)], 1e-4)
    engine.synchronize()
    waits, updating = _exposed(engine), Waits()
    updating.around(engine._optimizer, "_update", "update")
    forwards, backwards, steps = [], [], []
    for _ in range(options.repetitions):
        for _ in range(_IN_A_ROW):
            forward_s, backward_s = plain.step()
            forwards.append(forward_s)
            backwards.append(backward_s)
        start = time.perf_counter()
        # as in a training: the next step begins where this one ends
        for _ in range(_IN_A_ROW):
            engine.step([_batch(options)], 1e-4)
        engine.synchronize()  # what comes for another step counts for the first one here
        steps.append((time.perf_counter() - start) / _IN_A_ROW)
    count = options.repetitions * _IN_A_ROW
    forward, backward, step = map(statistics.median, (forwards, backwards, steps))
    update, out = updating.seconds["update"] / count, (root + layers * unit) / rate
    come, again = (size / rate for size in inward)
    head, tail = (root + unit) / rate, (root + unit) * (1 / rate + update / (root + layers * unit))
    parts = {"compute": forward + backward, "in": come + again, "out": out, "update": update}
    sequential = sum(parts.values())
    bound = max(head + forward + backward + tail, come + again + tail, head + out, update)
    phases = max(head + forward, come) + max(backward + tail, again + tail, out, update)
    return {
        "forward_ms": forward * 1e3,
        **{f"{name}_ms": value * 1e3 for name, value in parts.items()},
        "bound_ms": bound * 1e3,
        "phases_ms": phases * 1e3,
        "step_ms": step * 1e3,
        "sequential_ms": sequential * 1e3,
        "efficiency": 1 - (step - bound) / (sequential - bound),
        "of_phases": 1 - (step - phases) / (sequential - phases),
        **{f"exposed_{name}_ms": waits.seconds.get(name, 0.0) / count * 1e3 for name in _WAITS},
    }


class _Plain:
    """Computation without copies and updates."""

    def __init__(self, options: argparse.Namespace) -> None:
        model, weights = _model(options)
        weights.materialize(model)
        self._model, self._options = model, options

    def step(self) -> tuple[float, float]:
        """Return seconds of forward and of backward."""
        tokens, start = _batch(self._options), time.perf_counter()
        logits = self._model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        between = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        self._model.zero_grad()
        return between - start, end - between


def _bytes(options: argparse.Namespace, group: dist.ProcessGroup) -> tuple[int, int, int]:
    """Return bytes of the root and of a layer, and the number of layers."""
    root, unit, *others = _engine(options, group, ThrottledCopies()).units
    return root.size * 4, unit.size * 4, 1 + len(others)


def _exposed(engine: SlideEngine) -> Waits:
    waits, schedule = Waits(), engine._schedule
    waits.around(schedule, "_wait", "in")
    waits.around(schedule._offload._vectors, "_settle", "out")
    waits.around(engine._optimizer, "sum_of_squares", "landing")
    return waits


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
    full = parse_strategy({"engine": "slide", "window": options.window}).canonical()
    prepare(model, full)
    optimization = Optimization(0.1, 1.0 if options.clip else None, accumulation=1)
    fill = partial(_fill, weights, {module: name for name, module in model.named_modules()})
    return SlideEngine(model, EngineSetup(full, optimization, group, 0, _CPU, fill), copies)


def _fill(weights: RandomWeights, names: dict[Any, str], module: Any) -> None:
    weights.materialize(module, names[module])


if __name__ == "__main__":
    main()
