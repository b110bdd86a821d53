import math

import pytest

from benchmarks.islands.curves import length_at
from benchmarks.islands.methods import METHODS, strategies
from benchmarks.islands.report import crossing
from benchmarks.islands.training import lengths_around, tuned_rate
from shardlab.core.errors import UserError


def test_lengths_are_interpolated_in_log_steps() -> None:
    losses = {4000: 2.0, 1000: 4.0, 2000: 3.0}
    half = length_at(3.5, losses)
    assert half is not None
    assert math.exp(half.log) == pytest.approx(1000 * math.sqrt(2))
    # a nat doubles the steps here
    assert half.per_nat == pytest.approx(math.log(2))
    assert length_at(1.9, losses) is None
    assert length_at(4.1, losses) is None


@pytest.mark.parametrize(
    ("loss", "trained"), [(2.5, [1000, 1400, 2000]), (4.5, [1000, 700]), (0.1, [1000, 1400, 2000])]
)
def test_lengths_are_tried_until_the_loss_is_between_two(loss: float, trained: list[int]) -> None:
    losses = {500: 5.0, 700: 4.6, 1000: 4.0, 1400: 3.0, 2000: 2.0}
    asked = []

    def loss_at(steps: int) -> float:
        asked.append(steps)
        return losses[steps]

    lengths_around(1000, loss, loss_at)
    assert asked == trained


def test_learning_rates_are_tried_until_the_best_is_between_two() -> None:
    assert tuned_rate("a", {0.002: 3.0, 0.003: 2.0, 0.0045: 2.1}.__getitem__) == 0.003
    losses = {0.002: 3.0, 0.003: 2.0, 0.0045: 1.9, 0.0068: 1.95}
    assert tuned_rate("a", losses.__getitem__) == 0.0045
    with pytest.raises(UserError, match="the end of the learning rates"):
        tuned_rate("a", lambda rate: -rate)


def test_ratio_at_which_a_second_machine_pays_no_more() -> None:
    # a gain of 4 at a ratio of 1, of a quarter at 100: 1 in the middle of their logarithms
    assert crossing([(1.0, 4.0), (100.0, 0.25)]) == "10"
    assert crossing([(1.0, 4.0), (100.0, 2.0)]) == "beyond 100"
    assert crossing([(1.0, 0.9), (100.0, 0.5)]) == "never, in what was timed"


def test_every_method_has_a_strategy() -> None:
    assert {method.strategy for method in METHODS.values()} <= set(strategies())
