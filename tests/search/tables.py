"""Tables of made machines: workloads on which every strategy was timed."""

import math
from collections import Counter
from typing import Any

import numpy as np

from shardlab.config.strategy import CanonicalStrategy
from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.search.feasible import feasible
from shardlab.search.policies.judged import Search
from shardlab.search.policies.replay import Table
from tests.search.machine import SPACE, MadeMachine

REPETITIONS = 24


def made_table(machine: MadeMachine, count: int = 60) -> Table:
    """Return the start and strategies from all over the grid, with the machine's noise and drift.

    None needs bf16, which was not timed, or loses more perplexity than is tolerated.
    """
    history = machine.begin()
    found = [
        each.strategy
        for each in feasible(SPACE, machine.shapes, machine.ranks, lambda strategy: 0, 1, Counter())
        if each.strategy.param_dtype != "bf16" and machine.quality(each.strategy) <= 1.03
    ]
    drawn = np.random.default_rng(0).permutation(len(found))[: count - 1]
    start = history.reference.strategy
    strategies = {each.hash(): each for each in (start, *(found[n] for n in drawn))}
    drift = machine.rng.normal(0, 0.1, REPETITIONS)

    def steps(true: float) -> list[float]:
        noise = drift + machine.rng.normal(0, machine.noise / math.sqrt(2), REPETITIONS)
        return [*(1e3 * true * np.exp(noise))]

    def run(name: str, strategy: CanonicalStrategy | None, true: float) -> Any:
        return machine.run_of("table", name, strategy, machine.ranks, machine.link, steps(true))

    alone = sum(machine.truth.compute[min(machine.ranks, 2)]) * max(1.0, machine.ranks / 2)
    timed = [run(key, each, machine.seconds(each)) for key, each in strategies.items()]
    timed.append(run(NO_COMMUNICATION, None, alone))
    return Table.of(timed, start.hash(), lambda strategy: True)


def made_search(machine: MadeMachine) -> Search:
    return Search(
        machine.begin(), machine.agent(), machine.shapes, machine.calibration, machine.timed
    )
