"""A machine made for tests: true steps by formula, predictions with an error, races with noise."""

import math
from collections import Counter
from functools import cache

import numpy as np

from shardlab.choose.decision import conclude, train_promising
from shardlab.choose.history import History, initial_history
from shardlab.choose.judge import Judge
from shardlab.choose.proposal import propose
from shardlab.choose.race_rule import RaceRule, decide_race
from shardlab.choose.records import Candidate, Proposal, Trial, TrialSettings
from shardlab.choose.settings import Agent
from shardlab.choose.space import Feasible, feasible, formula_bytes
from shardlab.core.link import Link
from shardlab.models.block_shape import BlockShape
from shardlab.models.memory import Sizes, UnitShape
from shardlab.models.settings import Model
from shardlab.predict.model import Estimate
from shardlab.predict.settings import Space
from shardlab.results.result import Breakdown, FailureOutcome, UnitSize
from shardlab.results.timing_result import BLOCK, Race, TimingResult
from shardlab.strategy.document import CanonicalStrategy, parse_strategy
from shardlab.train.settings import Train
from tests.record_factory import (
    FIGURES,
    STRATEGIES,
    in_round,
    make_breakdown,
    make_failure,
    make_ledger,
    make_records,
    trial_run,
)
from tests.timed_run_factory import make_timed

ENDLESS = 10**15
_BLOCK = BlockShape(96, 96, 96, 96, feed_forward=384, expanded=384, wide=5 * 384, normalised=4 * 96)
SPACE = Space.model_validate(
    {
        "gradients": [
            STRATEGIES[run]["gradients"] for run in ("fsdp2-int8", "fsdp2-int4", "fsdp2-topk")
        ],
        "weights": ["int8:group=128"],
        "sync": [],
    }
)
SETTINGS = TrialSettings.of(Train(), Model(preset="tiny"), [0, 1])
_BYTES = {"none": 4.0, "int8": 1.03, "int4": 0.53, "topk": 0.4}
"""Bytes of an element on the wire, by codec."""


class Shapes:
    """A model of a root and two equal blocks, of as many parameters as the records have."""

    layers, samples, on_gpu = 2, 8, False
    root, block = 688_000, 312_000
    total = root + layers * block

    def units(self, strategy: CanonicalStrategy) -> list[UnitSize]:
        if strategy.bucket_mb is not None:
            count = math.ceil(4 * self.total / strategy.bucket_mb / 2**20)
            sizes = [self.total // count] * count
        elif strategy.wrap == "root":
            sizes = [self.total]
        else:
            sizes = [self.root, *[self.block] * self.layers]
        return [UnitSize(name=f"unit{number}", elements=n) for number, n in enumerate(sizes)]

    def sizes(self, strategy: CanonicalStrategy) -> Sizes:
        narrow = 2 if strategy.param_dtype == "bf16" else 4
        units = self.units(strategy)[1:] if strategy.wrap == "block" else []
        stays, parts = strategy.reshard_after_forward is False, strategy.accumulation or 1
        return Sizes(
            parameters=self.total,
            trained=self.total,
            units=tuple(UnitShape(u.elements, u.elements, stays, narrow) for u in units),
            element_bytes=narrow,
            checkpointing=(strategy.activation_checkpointing or "none",) * self.layers,
            width=96,
            blocks=(_BLOCK,) * self.layers,
            vocabulary=2048,
            tokens=self.samples // parts * 64,
            accumulation=parts,
        )


@cache
def space_of(ranks: int = 2, limit: int = ENDLESS) -> list[Feasible]:
    """All strategies without bf16 that fit a memory limit, bytes."""
    shapes = Shapes()
    legal = feasible(
        SPACE, shapes, ranks, lambda s: formula_bytes(s, shapes, ranks), limit, Counter()
    )
    return [option for option in legal if option.strategy.param_dtype != "bf16"]


def quality(strategy: CanonicalStrategy) -> float:
    """True perplexity over that of what is not compressed."""
    run = f"fsdp2-{strategy.gradients.codec.name}"
    ratio = FIGURES[run][2] / FIGURES["fsdp2"][2] if run in FIGURES else 1.0
    return ratio * (1.002 if strategy.weights else 1.0)


class Machine:
    """Ranks and a link, and a search on them.

    Attributes:
        faults: how races of a strategy end, by hash.
        factors: of true steps, unknown to predictions, by hash.

    Args:
        error: standard deviation of the logarithm of a true step over the predicted one.
        noise: of that of two interleaved steps.
    """

    def __init__(
        self,
        ranks: int = 2,
        rate: str | None = None,
        seed: int = 0,
        error: float = 0.02,
        noise: float = 0.1,
    ) -> None:
        self.ranks, self.link = ranks, None if rate is None else Link.model_validate({"rate": rate})
        self.rng, self._error, self._noise = np.random.default_rng(seed), error, noise
        self.shapes = Shapes()
        self.faults: dict[str, FailureOutcome] = {}
        self.factors: dict[str, float] = {}

    def agent(self, **settings: object) -> Agent:
        default = {"start": "fsdp2", "link": self.link, "candidates": "config"}
        return Agent.model_validate({**default, **settings})

    def begin(
        self,
        agent: Agent | None = None,
        timed: tuple[TimingResult, ...] = (),
        runs: list[str] | None = None,
    ) -> History:
        """Return the history of the matrix of tests/record_factory.py, or of these runs of it."""
        records = make_records(runs, seeds=2)
        records = [record.model_copy(update={"world_size": self.ranks}) for record in records]
        return initial_history(records, timed, agent or self.agent(), Train())

    def predicted_s(self, strategy: CanonicalStrategy) -> float:
        """Predict a step: compute, and what moves over the link."""
        codec_s = 2e-3 * (
            (strategy.gradients.codec.name != "none") + (strategy.weights is not None)
        )
        units_s = 2e-4 * len(self.shapes.units(strategy))
        saving_s = 8e-3 * (strategy.activation_checkpointing != "none")
        slide_s = 5e-3 * (strategy.engine == "slide")
        return 0.02 + codec_s + units_s + saving_s + slide_s + self._wire_s(strategy)

    def _moved(self, strategy: CanonicalStrategy) -> dict[str, float]:
        """Return the bytes that a rank sends in a step, by kind."""
        gradients = _BYTES.get(strategy.gradients.codec.name, 4.0)
        weights = _BYTES["int8"] if strategy.weights else 4.0
        replicated = strategy.engine == "ddp"
        elements = (1 - 1 / self.ranks) * self.shapes.total
        return {
            "gradients": (2 if replicated else 1) * gradients * elements,
            "weights": 0.0 if replicated else 2 * weights * elements,
        }

    def _wire_s(self, strategy: CanonicalStrategy) -> float:
        rate = self.link.bits_per_second / 8 if self.link else 1e9
        return sum(self._moved(strategy).values()) / rate

    def true_s(self, strategy: CanonicalStrategy) -> float:
        """Return the true step of a strategy, seconds."""
        key = strategy.hash()
        error = np.random.default_rng(int(key, 16)).normal(0, self._error)
        return self.factors.get(key, 1.0) * math.exp(error) * self.predicted_s(strategy)

    def propose(
        self,
        history: History,
        judge: Judge,
        agent: Agent | None = None,
        timed: tuple[TimingResult, ...] = (),
    ) -> Proposal:
        agent, number = agent or self.agent(), len(history.rounds) + 1
        limit = int(1e9 * agent.memory_limit_gb) if agent.memory_limit_gb else ENDLESS
        return propose(
            number, history, agent, limit, SPACE, self.shapes, self.predict, judge, timed, SETTINGS
        )

    def predict(self, strategy: CanonicalStrategy) -> Estimate | str:
        step_s = self.predicted_s(strategy)
        if strategy.param_dtype == "bf16":
            return "computation in bf16 was not timed"
        return Estimate(step_s, 0.9 * step_s, 1.1 * step_s)

    def search(
        self, judge: Judge, history: History | None = None, rounds: int = 8, **settings: object
    ) -> tuple[History, list[Proposal]]:
        """Search for so many rounds, or until nothing is raced."""
        agent, proposals = self.agent(**settings), []
        history = history or self.begin(agent)
        for _ in range(rounds):
            proposal = self.propose(history, judge, agent)
            proposals.append(proposal)
            history = conclude(history, proposal, self.trial(proposal, agent), agent)
            if not proposal.arms:
                break
        return history, proposals

    def trial(self, proposal: Proposal, agent: Agent) -> Trial:
        """Race the arms, and train as the stage does."""
        if not proposal.arms:
            return Trial(round=proposal.round)
        race = self.race(proposal, agent)

        def measure(arm: Candidate, seed: int, left_s: float) -> object:
            run = trial_run(arm.strategy, seed, proposal.round)
            noise = math.exp(self.rng.normal(0, 0.001))
            ppl = (run.val_ppl or 0.0) * quality(arm.strategy) * noise
            return run.model_copy(update={"val_ppl": ppl})

        trained = train_promising(race, proposal, agent, [0, 1], measure)  # type: ignore[arg-type]
        return Trial(round=proposal.round, race=race, results=[*trained], seconds=20.0)

    def race(self, proposal: Proposal, agent: Agent) -> Race:
        lost = {arm.hash: self.faults[arm.hash] for arm in proposal.arms if arm.hash in self.faults}
        running = {arm.hash: arm.strategy for arm in proposal.arms if arm.hash not in lost}
        steps: dict[str, list[float]] = {key: [] for key in running}
        name, load = f"round-{proposal.round}", proposal.workload
        setting = {"link": load.link, "world_size": load.world_size}
        rule, racing, reason = RaceRule.of(agent.budget, proposal.repetitions), {*running}, None
        while reason is None:
            drift = self.rng.normal(0, 0.1, BLOCK)
            for key in racing & steps.keys():
                noise = drift + self.rng.normal(0, self._noise / math.sqrt(2), BLOCK)
                steps[key] += [*(1e3 * self.true_s(running[key]) * np.exp(noise))]
            reason, leaving = decide_race(steps, proposal.incumbent, rule)
            racing -= {*leaving}
        return Race(
            name=name,
            incumbent=proposal.incumbent,
            reason=reason,
            seconds=20.0,
            runs=[
                self._traced(raced(key, running[key], steps[key], proposal.round))
                for key in running
            ],
            failures=[
                make_failure(arm.strategy, lost[arm.hash], kind="race", timing=name, **setting)
                for arm in proposal.arms
                if arm.hash in lost
            ],
        )

    def _traced(self, run: TimingResult) -> TimingResult:
        """Return a timed run on the link of the machine, which waits for all that it moves."""
        strategy = parse_strategy(run.strategy).canonical()
        moved = self._moved(strategy)
        step_s = self.predicted_s(strategy)
        ledger = {
            kind: {**make_ledger(strategy.engine, 1.0)[kind], "bytes_wire": n, "bytes_raw": n}
            for kind, n in moved.items()
        }
        setting = {"link": self.link.name if self.link else "loopback", "world_size": self.ranks}
        trace = make_breakdown(1e3 * step_s, self._wire_s(strategy) / step_s, 0.001)
        return run.model_copy(
            update={**setting, "ledger": ledger, "breakdown": Breakdown.model_validate(trace)}
        )


def raced(
    key: str, strategy: CanonicalStrategy, step_ms: list[float], number: int = 1
) -> TimingResult:
    run = make_timed("race", step_ms=step_ms, losses=[7.6])
    return run.model_copy(update={**in_round(strategy, number, "race"), "run": key})
