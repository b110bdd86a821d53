"""Searches on a made machine: its races are simulated, its training runs are made."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shardlab.config.race_record import BLOCK, Arm, Race
from shardlab.config.search import Agent
from shardlab.config.strategy import CanonicalStrategy
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun
from shardlab.search.decision import conclude, promising, race_rule
from shardlab.search.feasible import Feasible
from shardlab.search.history import History, mean_ratio
from shardlab.search.judge import Judge
from shardlab.search.proposal import Proposer
from shardlab.search.rounds import (
    Measurement,
    Outcome,
    Prediction,
    Proposal,
    Trained,
    Trial,
)
from shardlab.search.sequential import verdict
from shardlab.search.surrogate import Ranked
from tests.record_factory import make_record
from tests.search.machine import SPACE, MadeMachine


class Searched(NamedTuple):
    """A search: the history after its rounds, and what they proposed."""

    history: History
    proposals: list[Proposal]


class RacingMachine(MadeMachine):
    """Made machine that races, trains and searches.

    Attributes:
        faults: how races of a strategy end, by hash.
    """

    def __init__(self, *of: Any, **settings: Any) -> None:
        super().__init__(*of, **settings)
        self.faults: dict[str, Outcome] = {}

    def propose(self, history: History, judge: Judge, agent: Agent | None = None) -> Proposal:
        number, surrogate = len(history.rounds) + 1, self.surrogate(history)
        proposer = Proposer(history, agent or self.agent(), SPACE, self.shapes, surrogate)
        return proposer.propose(number, judge)

    def search(
        self, judge: Judge, history: History | None = None, rounds: int = 8, **settings: object
    ) -> Searched:
        """Search for so many rounds, or until nothing is raced."""
        agent = self.agent(**settings)
        found = Searched(history or self.begin(agent), [])
        for _ in range(rounds):
            proposal = self.propose(found.history, judge, agent)
            trial = self.trial(proposal, agent)
            after = conclude(found.history, proposal, trial, agent)
            found = Searched(after, [*found.proposals, proposal])
            if trial.race is None:
                break
        return found

    def trial(self, proposal: Proposal, agent: Agent) -> Trial:
        """Race the arms, and train as the stage does what may be held and may be worse."""
        if not proposal.arms:
            return Trial(round=proposal.round)
        race = self.race(proposal, agent)
        arms, trained = {arm.hash: arm for arm in proposal.arms}, []
        for key in promising(race, proposal, agent):
            if arms[key].trained:
                break
            trained.append(self._trained(arms[key].strategy))
            ratio = mean_ratio(trained[-1].measurements, proposal.reference)
            if ratio <= 1 + agent.quality_tolerance:
                break
        return Trial(round=proposal.round, race=race, trained=trained, seconds=20.0)

    def race(self, proposal: Proposal, agent: Agent) -> Race:
        strategies = {arm.hash: arm.strategy for arm in proposal.arms}
        lost = {key: self.faults[key] for key in strategies if key in self.faults}
        arms = {key: Arm(outcome=lost.get(key, "ok"), losses=[7.6, 7.4]) for key in strategies}
        if proposal.incumbent in lost:
            arms, reason, runs = {proposal.incumbent: arms[proposal.incumbent]}, "it failed", []
        else:
            reason, steps = self._interleaved(proposal, agent, {*strategies} - {*lost})
            runs = [self._raced(strategies[key], steps[key]) for key in steps]
            runs += [self.timed_run("race", NO_COMMUNICATION, self.ranks, self.link)]
        return Race(
            name=f"round-{proposal.round}",
            incumbent=proposal.incumbent,
            arms=arms,
            reason=reason,
            seconds=20.0,
            runs=runs,
        )

    def _interleaved(
        self, proposal: Proposal, agent: Agent, on: set[str]
    ) -> tuple[str, dict[str, list[float]]]:
        """Return why a race ended and the steps of its arms."""
        true = {a.hash: 1e3 * self.seconds(a.strategy) for a in proposal.arms if a.hash in on}
        steps: dict[str, list[float]] = {key: [] for key in true}
        rule, racing = race_rule(agent), {*true}
        while True:
            drift = self.rng.normal(0, 0.1, BLOCK)
            for key in steps:
                if key in racing:
                    noise = drift + self.rng.normal(0, self.noise / math.sqrt(2), BLOCK)
                    steps[key] += [*(true[key] * np.exp(noise))]
            ruling = verdict(steps, proposal.incumbent, rule, 0.0).ruling
            racing -= {*ruling.leave}
            if ruling.stop is not None:
                return ruling.stop, steps

    def _trained(self, strategy: CanonicalStrategy) -> Trained:
        runs = []
        for seed in range(2):
            ppl = make_record("fsdp2", seed).val_ppl
            assert ppl is not None
            noise = math.exp(self.rng.normal(0, 0.001))
            record = make_record("fsdp2", seed, val_ppl=ppl * self.quality(strategy) * noise)
            runs.append(Measurement.of(record))
        return Trained(hash=strategy.hash(), outcome="ok", measurements=runs)

    def _raced(self, strategy: CanonicalStrategy, step_ms: list[float]) -> TimedRun:
        return self.run_of("race", strategy.hash(), strategy, self.ranks, self.link, step_ms)


class FlatMachine(RacingMachine):
    """Machine of which nothing is predicted and steps take 40 ms, but for factors by hash.

    It has few strategies, all without codecs, so that hundreds of searches take seconds.
    """

    def __init__(self, known: list[Feasible], seed: int = 0, **rest: object) -> None:
        super().__init__(seed=seed, **rest)  # type: ignore[arg-type]
        self.known, self.factors = known, {each.hash: 1.0 for each in known}

    def seconds(self, strategy: CanonicalStrategy, *_: object) -> float:
        return 0.04 * getattr(self, "factors", {}).get(strategy.hash(), 1.0)

    def surrogate(self, history: History) -> "FlatMachine":  # type: ignore[override]
        return self

    def rank(self, found: Iterator[Feasible], unpredicted: Counter[str]) -> list[Ranked]:
        return [Ranked(each, 0.04) for each in found]

    def predict(self, each: Feasible) -> Prediction:
        figures = {"step_ms": 40.0, "low_ms": 35.0, "high_ms": 45.0, "perplexity_ratio": 1.0}
        return Prediction(memory_bytes=each.memory_bytes, **figures)
