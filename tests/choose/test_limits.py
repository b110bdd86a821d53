"""What a race and the training of an arm may take, by measured and predicted steps."""

from collections.abc import Sequence

import pytest

from shardlab.choose.limits import with_limits
from shardlab.choose.records import Proposal
from shardlab.choose.settings import Agent
from shardlab.strategy.document import Strategy, parse_strategy
from tests.choose.searches import DDP, begin, proposal_of
from tests.timed_run_factory import make_timed

BEGUN = begin(timed=[])
LINK = {"link": BEGUN.workload.link, "world_size": BEGUN.workload.world_size}


def limited(
    agent: Agent,
    predicted_ms: Sequence[float],
    arm: Strategy = DDP,
    trained_s: float = 0.0,
    timed: Sequence[float] = (),
) -> Proposal:
    """Return the limits of a race of the start and an arm.

    Args:
        predicted_ms: step of each.
        trained_s: that the start was trained for.
        timed: steps of the start on the link, in ms.
    """
    proposal = proposal_of(BEGUN, arm)
    arms = [
        candidate.model_copy(
            update={"prediction": candidate.prediction.model_copy(update={"step_ms": ms})}
        )
        for candidate, ms in zip(proposal.arms, predicted_ms, strict=True)
    ]
    steps = sum(run.steps for run in proposal.reference)
    mean = {"step_ms_mean": 1e3 * trained_s / steps}
    reference = [run.model_copy(update=mean) for run in proposal.reference]
    changed = proposal.model_copy(update={"arms": arms, "reference": reference})
    runs = [make_timed(step_ms=[*timed], **LINK)] if timed else []
    return with_limits(changed, agent, BEGUN, [*runs, make_timed(step_ms=[1e6], link="1gbit")])


@pytest.mark.parametrize(
    ("trained_s", "repetitions"),
    # a repetition takes 600 + 400 + 600 ms: of the start, the arm, and without communication
    [(0.0, 70), (120.0, 70), (160.0, 100), (176.0, 110), (1000.0, 120)],
)
def test_a_race_may_take_as_long_as_the_start_was_trained_and_at_least_two_minutes(
    trained_s, repetitions
):
    trial = limited(Agent(repetitions=120), [600, 400], trained_s=trained_s)
    assert trial.repetitions == repetitions
    assert trial.race_limit_s == pytest.approx(max(300, 2 * repetitions * 1.6))
    assert trial.training_limit_s == pytest.approx(max(300, 4 * trained_s))


def test_a_race_has_as_many_repetitions_as_an_interval_needs_however_long_they_take():
    """Steps that were measured on the link count before predictions: 20 s of the start, 30 s of
    the other arm."""
    trial = limited(Agent(), [1.0, 30e3], timed=[20e3] * 6)
    assert trial.repetitions == 20
    assert trial.race_limit_s == pytest.approx(2 * 20 * (20 + 30 + 30))
    assert limited(Agent(repetitions=10), [1.0, 30e3]).repetitions == 10


def test_a_repetition_is_a_round_where_an_arm_synchronises_rarely():
    """8 steps of each of both arms, and 8 without communication: 6 s."""
    rare = parse_strategy({"engine": "ddp", "sync": {"every": 8}})
    assert limited(Agent(), [250, 250], rare).repetitions == 20
    trial = limited(Agent(), [250, 250], rare, trained_s=300.0)
    assert (trial.repetitions, trial.race_limit_s) == (50, 600)


def test_limits_that_are_set_are_taken():
    trial = limited(Agent(trial_timeout_s=64), [300, 200], trained_s=1000.0)
    assert (trial.race_limit_s, trial.training_limit_s) == (64, 64)
    # half of it, after which no look comes
    assert trial.repetitions == 40
