"""Scaling efficiency of a strategy from its timings."""

from shardlab.results.timing_result import scaling_efficiency
from shardlab.strategy.document import parse_strategy
from tests.record_factory import STRATEGIES
from tests.timed_run_factory import make_timed

DDP = parse_strategy(STRATEGIES["ddp"]).hash()
ALONE = make_timed("one-rank", "ddp", 1, step_ms=[10.0, 20.0])
TWO = make_timed("two-ranks", "ddp", 2, step_ms=[20.0, 30.0])
SLOW = make_timed("slow", "ddp", 2, step_ms=[150.0])
TIMED = [ALONE, TWO, SLOW, make_timed("two-ranks", "fsdp2", 2)]


def test_scaling_efficiency_is_the_ratio_of_step_times() -> None:
    assert scaling_efficiency(TIMED, DDP, 2, "loopback") == 0.6
    assert scaling_efficiency(TIMED, DDP, 2, SLOW.link) == 0.1
    assert scaling_efficiency(TIMED, DDP, 1, "loopback") == 1.0


def test_scaling_efficiency_is_none_without_both_timings() -> None:
    fsdp2 = parse_strategy(STRATEGIES["fsdp2"]).hash()
    assert scaling_efficiency(TIMED, DDP, 4, "loopback") is None
    assert scaling_efficiency(TIMED, DDP, 2, "10mbit") is None
    assert scaling_efficiency(TIMED, fsdp2, 2, "loopback") is None
    assert scaling_efficiency([TWO], DDP, 2, "loopback") is None
