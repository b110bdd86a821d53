import math

import pytest

from benchmarks.islands import METHODS, parameters
from benchmarks.islands_report import crossing, steps_to
from shardlab.config.strategy import Strategy


def test_steps_to_a_loss_are_interpolated_in_log_steps() -> None:
    losses = {4000: 2.0, 1000: 4.0, 2000: 3.0}
    assert steps_to(3.5, losses) == pytest.approx(1000 * math.sqrt(2))
    assert steps_to(3.0, losses) == pytest.approx(2000)
    assert steps_to(1.9, losses) is None
    assert steps_to(4.1, losses) is None


def test_ratio_at_which_a_second_machine_pays_no_more() -> None:
    # a gain of 4 at a ratio of 1, of a quarter at 100: 1 in the middle of their logarithms
    assert crossing([(1.0, 4.0), (100.0, 0.25)]) == "10"
    assert crossing([(1.0, 4.0), (100.0, 2.0)]) == "beyond 100"
    assert crossing([(1.0, 0.9), (100.0, 0.5)]) == "never, in what was timed"


def test_every_method_has_a_strategy() -> None:
    strategies: dict[str, Strategy] = parameters()("strategies")
    assert {method.strategy for method in METHODS.values()} <= set(strategies)
