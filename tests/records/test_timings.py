"""Timings on one rank and on several tell how well a strategy scales."""

from shardlab.records.timing import scaling_efficiency
from shardlab.strategy.strategy import parse_strategy
from tests.record_factory import STRATEGIES
from tests.timed_run_factory import make_timed

DDP = parse_strategy(STRATEGIES["ddp"]).hash()
ALONE = make_timed("one-rank", "ddp", 1, step_ms=[10.0, 20.0])
TWO = make_timed("two-ranks", "ddp", 2, step_ms=[20.0, 30.0])
SLOW = make_timed("slow", "ddp", 2, step_ms=[150.0])
TIMED = [ALONE, TWO, SLOW, make_timed("two-ranks", "fsdp2", 2)]


def test_it_is_the_ratio_of_the_step_times() -> None:
    assert scaling_efficiency(TIMED, DDP, 2, "loopback") == 0.6
    assert scaling_efficiency(TIMED, DDP, 2, SLOW.link) == 0.1
    assert scaling_efficiency(TIMED, DDP, 1, "loopback") == 1.0


def test_what_was_not_timed_is_not_known() -> None:
    fsdp2 = parse_strategy(STRATEGIES["fsdp2"]).hash()
    assert scaling_efficiency(TIMED, DDP, 4, "loopback") is None
    assert scaling_efficiency(TIMED, DDP, 2, "10mbit") is None
    assert scaling_efficiency(TIMED, fsdp2, 2, "loopback") is None
    assert scaling_efficiency([TWO], DDP, 2, "loopback") is None
