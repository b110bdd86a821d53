"""Timings made for tests: no run produced these figures."""

import random
from typing import Any

from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.strategy.document import Strategy, parse_strategy
from tests.record_factory import (
    BASELINE,
    FIGURES,
    HOST,
    QUIET,
    STRATEGIES,
    make_breakdown,
    make_ledger,
)

# of a model of a million parameters: rates on which all traffic takes longer than anything else
RATES: dict[str, int | None] = {"two-ranks": None, "slow": 10**8, "fast": 10**9}


def timed_facts(
    timing: str, run: str, world_size: int, rate: int | None, strategy: Strategy | None
) -> dict[str, Any]:
    """Fields of a timed run that do not depend on its measurements."""
    return {
        "timing": timing,
        "run": run,
        "strategy": strategy and strategy.canonical().model_dump(mode="json"),
        "strategy_hash": strategy and strategy.hash(),
        "model": "tiny",
        "world_size": world_size,
        "threads": 1,
        "batch_size": 8,
        "accumulation": 1,
        "sequence_length": 64,
        "link": "loopback" if rate is None else f"{rate // 10**6}mbit",
        "link_emulation": "none" if rate is None else "namespaces",
        "bits_per_second": rate,
        "delay_ms": 0.0,
        "ranks_per_node": 1,
        "revision": "4e41bc4d1a2b",
        "torch": "2.13.0+cpu",
        "host": HOST,
        "contention": QUIET,
        "kernels": "libshardlab_kernels_v4.so, csrc 0123456789ab",
    }


def make_timed(
    timing: str = "slow",
    run: str = BASELINE,
    world_size: int = 2,
    rounds: int = 6,
    **changes: Any,
) -> TimingResult:
    """One run of a timing; `changes` replace fields. A step is compute plus bytes over rate."""
    bound = run == NO_COMMUNICATION
    strategy = None if bound else parse_strategy(STRATEGIES.get(run, STRATEGIES[BASELINE]))
    figures = FIGURES.get(run, FIGURES[BASELINE])
    ledger = make_ledger(strategy.engine if strategy else "ddp", figures[1] if strategy else 1.0)
    raw, wire = (
        0.0 if bound or world_size == 1 else sum(kind[key] for kind in ledger.values())
        for key in ("bytes_raw", "bytes_wire")
    )
    rate = RATES.get(timing)
    sending = wire * 8e3 / (rate or 10**10)
    compute = figures[0] / 2 if strategy else 18.0
    chance, drift = random.Random(f"{timing} {run}"), random.Random(timing)
    step_ms = [
        (compute + sending) * (1 + 0.2 * drift.random()) * (1 + 0.02 * chance.uniform(-1, 1))
        for _ in range(rounds)
    ]
    step = sum(step_ms) / rounds
    facts: dict[str, Any] = {
        **timed_facts(timing, run, world_size, rate, strategy),
        "parameters": 1_312_000,
        "units": [{"name": "root", "elements": 1_312_000}],
        "step_ms": step_ms,
        "bytes_raw": raw,
        "bytes_wire": wire,
        "interface_bytes": None if rate is None else 1.01 * wire + 66 * 200,
        "interface_frames": None if rate is None else 200.0,
        "ledger": ledger,
        "breakdown": make_breakdown(step, sending / (compute + sending), 0.02),
    }
    return TimingResult(**{**facts, **changes})


def make_timings(runs: list[str] | None = None, **changes: Any) -> list[TimingResult]:
    """One rank, two without a link, two on a slow and on a fast one."""
    named = [*(runs or STRATEGIES), NO_COMMUNICATION]
    alone = [make_timed("one-rank", run, world_size=1, **changes) for run in named]
    return alone + [make_timed(timing, run, **changes) for timing in RATES for run in named]
