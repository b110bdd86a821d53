"""Strategies of the search's space, and how many are enumerated and predicted per second.

    python -m benchmarks.search_space [--models tiny 62m] [--ranks 2 4 8]

Costs of operations are made up: the figures are CPU times of the prediction, not its results.
"""

import time
from collections import Counter
from typing import get_args

from benchmarks.common import WORK, arguments, print_table, write_results
from shardlab.config.calibration_record import MemoryOperation, Operation
from shardlab.config.engine_traits import ENGINES
from shardlab.config.model_and_data import Model
from shardlab.config.schema import Space, Train
from shardlab.core.document import validate
from shardlab.forecast.machine import CodecLines, Line, Machine
from shardlab.forecast.measured_costs import codecs_of
from shardlab.forecast.model import Model as Forecast
from shardlab.forecast.overheads import Engines
from shardlab.forecast.work import Compute
from shardlab.forecast.workload import Workload
from shardlab.models.build import build_model
from shardlab.models.unit_shapes import ModelShapes
from shardlab.search.feasible import feasible, formula_bytes

_LINE = Line(1e-4, 1e-9)
_ENDLESS = 10**15


def made_forecast(space: Space) -> Forecast:
    """Return a model of which every operation has the same cost."""
    codec = CodecLines(_LINE, _LINE, Line(8.0, 0.5))
    machine = Machine(
        dict.fromkeys(get_args(Operation), _LINE),
        dict.fromkeys(codecs_of([], space), codec),
        dict.fromkeys(get_args(MemoryOperation), _LINE),
    )
    compute = {busy: Compute(1e-2, 2e-2, 2e-3) for busy in (1, 2)}
    return Forecast(machine, 2.0, compute, Engines(dict.fromkeys(ENGINES, 1e-4), 1e-3))


def main() -> None:
    args = arguments(__doc__, models=["tiny", "62m"], ranks=[2, 4, 8])
    space, rows = Space(), []
    forecast = made_forecast(space)
    for preset in args.models:
        module = build_model(validate(Model, {"preset": preset}, "--models"), 2048, 64, 0, 0).module
        parameters = sum(each.numel() for each in module.parameters())
        for ranks in args.ranks:
            train = validate(Train, {}, "train")
            shapes, count = ModelShapes(module, train), Counter[str]()
            begun = time.process_time()
            found = list(
                feasible(
                    space,
                    shapes,
                    ranks,
                    lambda each, of=shapes, on=ranks: formula_bytes(each, of, on),  # type: ignore[misc]
                    _ENDLESS,
                    count,
                )
            )
            listed = time.process_time()
            workload = Workload(ranks, parameters, bits_per_second=10**8)
            known = [each.strategy for each in found if not forecast.obstacle(each.strategy)]
            for each in known:
                forecast.predict(each, shapes.units(each), workload)
            times = listed - begun, time.process_time() - listed
            figures = count["legal"], len(found), len(known), times[0], len(known) / times[1]
            rows.append(
                [preset, str(ranks), *(f"{each:,.1f}".removesuffix(".0") for each in figures)]
            )
    headings = ["model", "ranks", "legal", "feasible", "predicted", "listing s", "predicted per s"]
    write_results(WORK[0] / "search_space.json", headings=headings, rows=rows)
    print_table("Space of the search, CPU time", headings, rows)


if __name__ == "__main__":
    main()
