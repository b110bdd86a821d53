"""Forecast of steps of the slide engine that `benchmarks.slide` has measured.

    python -m benchmarks.slide_forecast FILE... [--repetitions R] [--out FILE]

The computation and the rate of the copies are those of each file, the costs of memory are measured
now, and nothing is fitted on the steps. Ratios are forecast over measured.
"""

import argparse
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import on_ranks, print_table
from shardlab.config.calibration_record import MemoryCost, MemoryOperation, Operation
from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.core.files import read_json, write_json
from shardlab.forecast.coding import codings
from shardlab.forecast.costs import Measured
from shardlab.forecast.machine import Line, Machine, fit_memory
from shardlab.forecast.measured_costs import memory_times
from shardlab.forecast.schedule import Phase, simulate
from shardlab.forecast.sliding import Slide
from shardlab.forecast.work import COMPUTE, Compute, Overhead, Work
from shardlab.models.presets import Shape, shape_config
from shardlab.models.units import unit_sizes
from shardlab.report.numbers import figure

_STEPS = 6
_WAITS = {"in": ("forward", "backward"), "out": ("settle",), "landing": ("landed",)}


class Throttled(Measured):
    """Machine whose copies end no earlier than on a link of a given rate."""

    def __init__(self, *given: Any, bytes_per_second: float) -> None:
        super().__init__(*given)
        self._copies = bytes_per_second

    def move(self, operation: MemoryOperation, nbytes: float) -> Phase:  # noqa: D102
        phase = super().move(operation, nbytes)
        if operation != "copy":
            return phase
        return phase._replace(wait=max(nbytes / self._copies - phase.cpu, 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--repetitions", type=int, default=12, help="of the costs of memory")
    parser.add_argument("--out", type=Path, default=Path(".work/benchmarks/slide_forecast.json"))
    given = parser.parse_args()
    rows = [row for file in given.files for row in _rows(read_json(file), given.repetitions)]
    body = [
        [value if isinstance(value, str) else figure(value) for value in row.values()]
        for row in rows
    ]
    print_table("The forecast of the slide engine", [*rows[0]], body)
    write_json(given.out, rows)


def _rows(measured: dict[str, Any], repetitions: int) -> list[dict[str, Any]]:
    options, host = measured["options"], measured["host"]
    world_size = int(options["world_size"])
    costs = on_ranks(world_size, partial(memory_times, ["copy", "update"], repetitions))[0]
    norm: dict[Operation, Line] = {"all_reduce": Line(0.0, 0.0)}  # of one number
    machine = Machine(norm, {}, fit_memory([MemoryCost(**each) for each in costs]))
    row = partial(_row, options, machine, world_size, float(host["cores"]))
    return [row(each) for each in measured["rows"]]


def _row(
    options: dict[str, str],
    machine: Machine,
    world_size: int,
    cores: float,
    measured: dict[str, float],
) -> dict[str, Any]:
    full = parse_strategy({"engine": "slide", "window": int(options["window"])}).canonical()
    units = _units(options, full)
    forward = measured["forward_ms"] / 1e3
    work = Work(
        full,
        units,
        1,
        Compute(forward, measured["compute_ms"] / 1e3 - forward, 0.0),
        Overhead(0.0, 0.0),
        *codings(full, machine),
        holding=options["clip"] == "True",
    )
    again = sum(units[1 + int(options["window"]) :])
    rate = 4 * (sum(units) + again) / (measured["in_ms"] / 1e3)
    step = Slide(work, Throttled(machine, world_size, cores, bytes_per_second=rate))
    tasks = step.tasks(_STEPS)
    spans = simulate(tasks, step.costs.rank)
    first, *_, before, end = (spans[name].end for name in step.ends)
    mine = [task.name for task in tasks if task.lane == COMPUTE]
    waits = dict.fromkeys(_WAITS, 0.0)
    for one, then in itertools.pairwise(mine):
        for what, words in _WAITS.items():
            if then.split()[1] in words and spans[one].end > first - 1e-12:
                waits[what] += (spans[then].start - spans[one].end) / (_STEPS - 1)
    return {
        "share": measured["share"],
        "measured_ms": measured["step_ms"],
        "forecast_ms": 1e3 * (end - before),
        "ratio": 1e3 * (end - before) / measured["step_ms"],
        "bound_ms": measured["bound_ms"],
        **{
            f"exposed_{name}": f"{measured[f'exposed_{name}_ms']:.3g} / {1e3 * seconds:.3g}"
            for name, seconds in waits.items()
        },
    }


def _units(options: dict[str, str], full: CanonicalStrategy) -> tuple[int, ...]:
    """Return the elements of units, as in `benchmarks.slide`."""
    shape = Shape(int(options["layers"]), int(options["width"]), 4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape, 512, 64, 0))
    return tuple(unit.elements for unit in unit_sizes(model, full, torch.device("cpu")))


if __name__ == "__main__":
    main()
