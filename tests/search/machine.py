"""A made machine: the true step times of all strategies, what its measurements say, its races.

Costs of operations are those of tests/forecast/timing_factory.py times lognormal factors, and each
strategy takes a little more or less than the model, which shares their structure, can know.
"""

import math
from collections.abc import Mapping

import numpy as np
from shardlab.forecast.overheads import Engines
from shardlab.forecast.workload import Workload

from shardlab.config.link import Link
from shardlab.config.schema import Space, Train
from shardlab.config.search import Agent
from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun
from shardlab.forecast.machine import CodecLines, Line, Machine
from shardlab.forecast.model import Model
from shardlab.search.beginning import initial_history
from shardlab.search.history import History
from shardlab.search.surrogate import Surrogate, fit
from tests.forecast.timing_factory import INT8, MODEL, made_calibration, made_run
from tests.record_factory import FIGURES, STRATEGIES, make_records
from tests.search.shapes import MadeShapes

TIMED = ("ddp", "fsdp2", "manual", "slide")
"""runs that the model is fitted on"""
SPACE = Space.model_validate(
    {
        "gradients": [
            STRATEGIES[run]["gradients"] for run in ("fsdp2-int8", "fsdp2-int4", "fsdp2-topk")
        ],
        "weights": ["int8:group=128"],
    }
)
_PAYLOADS = {
    (INT8, False): 1 + 4 / 128,
    ("int4:group=128", True): 0.5 + 4 / 128,
    ("topk:density=0.05", True): 0.4,
}
"""bytes per element, by codec and error feedback"""
_QUALITY = {
    codec: FIGURES[f"fsdp2-{codec}"][2] / FIGURES["fsdp2"][2] for codec in ("int8", "int4", "topk")
}


class MadeMachine:
    """A machine with ranks and a link.

    Args:
        spread: standard deviation of the logarithm of each cost over the factory's.
        error: of each strategy's step over what the model says.
        noise: of the ratio of two interleaved steps.
        transport: factor of the cost of all transfers.
        overheads: CPU seconds of a collective of an engine, where they are not the factory's.
    """

    def __init__(
        self,
        ranks: int = 2,
        rate: str | None = None,
        seed: int = 0,
        spread: float = 0.5,
        error: float = 0.06,
        noise: float = 0.2,
        transport: float = 1.0,
        overheads: Mapping[str, float] | None = None,
    ) -> None:
        self.ranks, self.link = ranks, None if rate is None else Link.model_validate({"rate": rate})
        self.rng, self._error, self.noise = np.random.default_rng(seed), error, noise
        self.shapes = MadeShapes()
        machine = _machine(self.rng, spread, transport)
        self.calibration = made_calibration(machine)
        works = {
            name: cost * math.exp(self.rng.normal(0, spread))
            for name, cost in MODEL.engines.work.items()
        } | dict(overheads or {})
        self.truth: Model = MODEL._replace(machine=machine, engines=Engines(works, wait=1.8e-3))
        self._errors: dict[str, float] = {}
        self.timed = [
            self.timed_run(name, run, *place)
            for name, place in {
                "one-rank": (1, None),
                "two-ranks": (2, None),
                "fast": (2, Link.model_validate({"rate": "1gbit"})),
            }.items()
            for run in (*TIMED, NO_COMMUNICATION)
        ]

    @property
    def workload(self) -> Workload:
        """Of the search."""
        return self._workload(self.ranks, self.link)

    def agent(self, **settings: object) -> Agent:
        return Agent.model_validate({"start": "fsdp2", "link": self.link, **settings})

    def begin(self, agent: Agent | None = None, timed: list[TimedRun] | None = None) -> History:
        """Return the history of the matrix of tests/record_factory.py."""
        records = [
            each.model_copy(update={"world_size": self.ranks}) for each in make_records(seeds=2)
        ]
        return initial_history(records, timed or [], agent or self.agent(), Train())

    def surrogate(self, history: History) -> Surrogate:
        """Return predictions fitted on timings and races, as the stage does."""
        raced = [run for race in history.races for run in race.runs]
        model = fit(self.calibration, self.timed, raced)
        return Surrogate(model, self.workload, self.shapes, history)

    def seconds(self, strategy: CanonicalStrategy, workload: Workload | None = None) -> float:
        """Return the true step of a strategy."""
        key = strategy.hash()
        if key not in self._errors:
            chance = np.random.default_rng(int(key, 16))
            self._errors[key] = math.exp(chance.normal(0, self._error))
        units = self.shapes.units(strategy)
        return self._errors[key] * self.truth.predict(strategy, units, workload or self.workload)

    def quality(self, strategy: CanonicalStrategy) -> float:
        """Return the true perplexity over that of what is not compressed."""
        weights = 1.002 if strategy.weights else 1.0
        return weights * _QUALITY.get(strategy.gradients.codec.name, 1.0)

    def timed_run(self, timing: str, run: str, ranks: int, link: Link | None) -> TimedRun:
        if run == NO_COMMUNICATION:
            strategy, step = None, sum(MODEL.compute[min(ranks, 2)]) * max(1.0, ranks / 2)
        else:
            strategy = parse_strategy(STRATEGIES.get(run, {"engine": run})).canonical()
            step = self.seconds(strategy, self._workload(ranks, link))
        noise = np.exp(self.rng.normal(0, self.noise / math.sqrt(2), 40))
        return self.run_of(timing, run, strategy, ranks, link, [*(1e3 * step * noise)])

    def run_of(
        self,
        timing: str,
        run: str,
        strategy: CanonicalStrategy | None,
        ranks: int,
        link: Link | None,
        step_ms: list[float],
    ) -> TimedRun:
        rate = None if link is None else str(link.rate)
        name = run if strategy is None else "ddp"
        facts = {
            "run": run,
            "strategy": strategy and strategy.model_dump(mode="json"),
            "strategy_hash": strategy and strategy.hash(),
            "units": self.shapes.units(strategy) if strategy else [],
            "parameters": 1_312_000,
        }
        return made_run(timing, name, ranks, rate, step_ms=step_ms).model_copy(update=facts)

    def _workload(self, ranks: int, link: Link | None) -> Workload:
        bits = link and link.bits_per_second
        emulation = "none" if link is None else "namespaces"
        return Workload(ranks, 1_312_000, bits_per_second=bits, link_emulation=emulation)


def _machine(rng: np.random.Generator, spread: float, transport: float) -> Machine:
    """Return the machine of the factory with other costs and more codecs."""

    def scaled(line: Line, factor: float = 1.0) -> Line:
        factor *= math.exp(rng.normal(0, spread))
        return Line(factor * line.alpha, factor * line.beta)

    known = MODEL.machine
    coded = known.codecs[INT8, False]
    return Machine(
        {name: scaled(line, transport) for name, line in known.transport.items()},
        {
            codec: CodecLines(scaled(coded.encode), scaled(coded.decode), Line(8.0, size))
            for codec, size in _PAYLOADS.items()
        },
        {name: scaled(line) for name, line in known.memory.items()},
    )
