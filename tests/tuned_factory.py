"""Tuned methods made for tests: no run produced these losses, no timing these steps."""

from collections.abc import Mapping
from typing import Any

from shardlab.report.tuned import Tuned
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.results.tune_result import TuneResult
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.train.settings import Train
from shardlab.train.tune_settings import Method, Tune
from tests.record_factory import make_record
from tests.timed_run_factory import make_timed

INT4 = {"codec": "int4", "error_feedback": True}
STRATEGIES: dict[str, Strategy] = {
    name: parse_strategy(document)
    for name, document in {
        "ddp": {"engine": "ddp"},
        "ddp-bf16": {"engine": "ddp", "gradients": {"codec": "bf16"}},
        "ddp-int4": {"engine": "ddp", "gradients": INT4},
        "rare": {"engine": "ddp", "sync": {"every": 8}},
        "rare-warm": {
            "engine": "ddp",
            "gradients": INT4,
            "sync": {"every": 8, "warmup_steps": 200},
        },
    }.items()
}
METHODS: dict[str, dict[str, Any]] = {
    "stock": {"strategies": ["ddp", "ddp-bf16"]},
    "int4": {"strategies": ["ddp-int4"]},
    "rare": {"strategies": ["rare"]},
}
TARGET = 3.0
TRAIN = Train(steps=2000, learning_rate=0.003)
EQUAL = {(0, 1400): 4.0, (0, 2000): 3.0}
"""losses by seed and steps of a run that reaches the target after the tokens of `TRAIN`"""
Losses = Mapping[tuple[int, int], float | None]


def make_row(**changes: Any) -> TuneResult:
    """One run; `changes` replace fields."""
    facts: dict[str, Any] = {
        **make_record("ddp").header(),
        "kind": "tune",
        "run": "stock",
        "key": "0123456789abcdef",
        "micro_batches": 2,
        "steps": 2000,
        "learning_rate": 0.003,
        "betas": TRAIN.betas,
        "tokens_per_step": 512 * changes.get("micro_batches", 2),
        "bytes_wire": 1e3,
        "val_loss": TARGET,
        "val_tokens": 1000,
    }
    return TuneResult(**{**facts, **changes})


def make_rows(
    method: str, losses: Losses, micro_batches: int = 2, rate: float = 0.003, **changes: Any
) -> list[TuneResult]:
    """Runs by seed and steps; `changes` replace fields."""
    run = {"run": method, "micro_batches": micro_batches, "learning_rate": rate, **changes}
    return [
        make_row(**run, seed=seed, steps=steps, val_loss=loss)
        for (seed, steps), loss in losses.items()
    ]


def make_tuned(
    *rows: list[TuneResult],
    methods: Mapping[str, dict[str, Any]] | None = None,
    tune: Mapping[str, Any] | None = None,
) -> Tuned:
    """Methods with two micro-batches, and their runs."""
    settings = {
        "target_loss": TARGET,
        "learning_rates": [0.002, 0.003, 0.0045],
        "micro_batches": {2: 1},
        **(tune or {}),
    }
    return Tuned(
        Tune.model_validate(settings),
        {name: Method.model_validate(m) for name, m in (methods or METHODS).items()},
        STRATEGIES,
        TRAIN,
        (0, 1, 2),
        "ddp",
        [row for of_method in rows for row in of_method],
    )


def make_steps(
    step_ms: Mapping[str, list[float]], link: str = "slow", parts: int = 1, **changes: Any
) -> list[TimingResult]:
    """Two ranks on a link; `alone` is one rank with the micro-batches of both."""
    bound, runs = {NO_COMMUNICATION: [100.0] * 2}, []
    for run, times in {**bound, **step_ms}.items():
        facts = {"step_ms": times, "accumulation": parts, **changes}
        if run == "alone":
            facts["accumulation"] = 2 * parts
            runs.append(make_timed(f"{link}-{run}", NO_COMMUNICATION, 1, **facts))
            continue
        strategy = STRATEGIES.get(run)
        if strategy is not None:
            facts["strategy"] = strategy.canonical().model_dump(mode="json")
            facts["strategy_hash"] = strategy.hash()
        runs.append(make_timed(link, run, **facts))
    return runs
