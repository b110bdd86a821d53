"""Runs of methods made for tests: no training produced these figures."""

from typing import Any

from shardlab.core.files import sha256_of_value
from shardlab.results.tune_result import TuneResult
from shardlab.strategy.document import parse_strategy
from tests.record_factory import STRATEGIES
from tests.timed_run_factory import timed_facts


def make_tuned(
    method: str = "stock", strategy: str = "ddp", world_size: int = 2, **changes: Any
) -> TuneResult:
    """One run of a method; `changes` replace fields."""
    header = timed_facts("", method, world_size, None, parse_strategy(STRATEGIES[strategy]))
    del header["threads"], header["contention"]
    run: dict[str, Any] = {
        "seed": 0,
        "micro_batches": 2,
        "steps": 100,
        "learning_rate": 0.003,
        "betas": (0.9, 0.95),
    }
    run |= {key: changes[key] for key in changes if key in run}
    facts: dict[str, Any] = {
        **header,
        **run,
        "parameters": 1_312_000,
        "batch_size": 8 * run["micro_batches"] // world_size,
        "key": sha256_of_value([method, strategy, world_size, run])[:16],
        "tokens_per_step": 512 * run["micro_batches"],
        "bytes_wire": 5.2e6,
        "val_loss": 3.5,
        "val_tokens": 10_000,
    }
    return TuneResult(**{**facts, **changes})
