"""Scaling efficiency of a strategy from its timings."""

from typing import Any

from shardlab.results.timing_result import scaling_efficiency
from tests.record_factory import make_record
from tests.timed_run_factory import make_timed

ALONE = make_timed("one-rank", "ddp", 1, step_ms=[10.0, 20.0])
TWO = make_timed("two-ranks", "ddp", 2, step_ms=[20.0, 30.0])
SLOW = make_timed("slow", "ddp", 2, step_ms=[150.0])
TIMED = [ALONE, TWO, SLOW, make_timed("two-ranks", "fsdp2", 2)]


def efficiency_of(run: str = "ddp", **changes: Any) -> float | None:
    return scaling_efficiency(TIMED, make_record(run, **changes))


def test_scaling_efficiency_is_the_ratio_of_step_times() -> None:
    assert efficiency_of() == 0.6
    assert efficiency_of(link=SLOW.link) == 0.1
    assert efficiency_of(world_size=1) == 1.0


def test_scaling_efficiency_is_none_without_both_timings() -> None:
    assert efficiency_of(world_size=4) is None
    assert efficiency_of(link="10mbit") is None
    assert efficiency_of("fsdp2") is None
    assert scaling_efficiency([TWO], make_record("ddp")) is None


def test_scaling_efficiency_of_one_batch_of_all_ranks_is_half_the_ratio() -> None:
    half = TWO.model_copy(update={"batch_size": 4})
    assert scaling_efficiency([ALONE, half], make_record("ddp")) == 0.3


def test_scaling_efficiency_is_that_of_as_many_micro_batches() -> None:
    four = [run.model_copy(update={"accumulation": 4, "step_ms": [80.0]}) for run in (ALONE, TWO)]
    assert scaling_efficiency([*four, *TIMED], make_record("ddp")) == 0.6
    assert scaling_efficiency([four[0], TWO], make_record("ddp")) is None
