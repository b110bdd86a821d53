"""What a round decides: the fastest arm that was shown to be faster, and as good, is held."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.choose.decision import conclude, train_promising
from shardlab.choose.history import History
from shardlab.choose.incumbent import best_measured
from shardlab.choose.records import Candidate, Decision
from shardlab.core.errors import UserError
from shardlab.results.result import Failure, FailureOutcome
from shardlab.results.train_result import TrainResult
from shardlab.strategy.document import Strategy, parse_strategy
from tests.choose.searches import (
    AGENT,
    DDP,
    DDP_INT8,
    FSDP2,
    INT4_KEPT,
    KEPT,
    LIMIT,
    begin,
    failed,
    proposal_of,
    trained,
    trial_of,
)
from tests.record_factory import trial_run

HISTORY = begin(["fsdp2", "ddp", "ddp-int8"])

RARE = parse_strategy({"engine": "ddp", "sync": {"every": 8}})


INT8 = {"codec": "int8:group=128"}
BOTH_INT8 = parse_strategy({"gradients": INT8, "weights": INT8})


def trained_with_peaks(strategy: Strategy, *peaks: int) -> list[TrainResult]:
    """Training runs of a strategy, whose seeds have these peaks of memory."""
    pairs = zip(trained(strategy), peaks, strict=True)
    return [run.model_copy(update={"memory_peak_bytes": peak}) for run, peak in pairs]


def key(strategy: Strategy) -> str:
    return f"_{strategy.hash()}"


def after(
    figures: dict[Strategy, float | FailureOutcome],
    *runs: Sequence[TrainResult | Failure],
    history: History = HISTORY,
    fits: bool = True,
    **how: Any,
) -> History:
    proposal = proposal_of(history, *figures).model_copy(update={"fits": fits})
    ratios = {key(strategy): figure for strategy, figure in figures.items()}
    return conclude(history, proposal, trial_of(proposal, *runs, **how, **ratios), AGENT)


def last(*arguments: Any, **how: Any) -> Decision:
    return after(*arguments, **how).rounds[-1]


@settings(max_examples=20, deadline=None)
@given(st.floats(0.3, 3), st.floats(0.3, 3), st.floats(0.98, 1.08), st.integers(1, 2 * LIMIT))
def test_the_fastest_is_held_that_is_shown_to_be_faster_as_good_and_small_enough(
    ddp, other, quality, peak
):
    runs = trained(INT4_KEPT, quality, memory_peak_bytes=peak)
    history = after({DDP: ddp, INT4_KEPT: other}, runs)
    steps = {arm.hash: arm.step for arm in history.rounds[-1].compared}
    fast = {
        strategy.hash(): steps[strategy.hash()].ratio
        for strategy, good in ((DDP, True), (INT4_KEPT, quality <= 1.03 and peak <= LIMIT))
        if good and steps[strategy.hash()].high < 1
    }
    shortest = min(fast.values(), default=1.0)
    # among arms that the race does not tell apart, one without loss is accepted
    close = {key for key, ratio in fast.items() if ratio <= 1.1 * shortest}
    assert history.incumbent in (close or {FSDP2.hash()})
    assert history.rounds[-1].decision == ("accept" if fast else "reject")
    shown = {arm.hash for arm in history.rounds[-1].compared if not arm.objections}
    assert shown == {*fast}


def test_of_those_that_the_race_does_not_tell_apart_the_one_without_loss_is_held():
    last_round = last({DDP: 0.5, INT4_KEPT: 0.5}, trained(INT4_KEPT))
    assert last_round.held == DDP.hash()
    assert last_round.reason.endswith(
        "; not told apart from " + INT4_KEPT.canonical().label() + ", but has no loss"
    )
    assert last({DDP: 0.5, INT4_KEPT: 0.4}, trained(INT4_KEPT)).held == INT4_KEPT.hash()


@pytest.mark.parametrize(
    ("figures", "runs", "how", "reason"),
    [
        ({DDP: 1.0}, [], {}, "no gain in step time is shown"),
        ({DDP: 1.5}, [], {}, "it is slower"),
        ({DDP: "crash"}, [], {}, "it ended with outcome crash: by test"),
        ({INT4_KEPT: 0.5}, [], {}, "its perplexity was not measured"),
        # no codec of gradients, as the start
        ({RARE: 0.1}, [], {}, "its perplexity was not measured"),
        (
            {RARE: 0.1},
            [trained(RARE, 1.05, steps=240)],
            {},
            "perplexity is above 1.030 times the base",
        ),
        (
            {INT4_KEPT: 0.5},
            [trained(INT4_KEPT, 1.05)],
            {},
            "1.030 times the baseline's (seeds trained: 2)",
        ),
        ({INT4_KEPT: 0.5}, [trained(INT4_KEPT, memory_peak_bytes=2 * LIMIT)], {}, "above 4000 MB"),
        (
            {INT4_KEPT: 0.5},
            [failed(INT4_KEPT, "diverged", "step 7")],
            {},
            "its trial ended with outcome diverged: seed 0: step 7",
        ),
        # in one seed of two
        (
            {INT4_KEPT: 0.5},
            [trained_with_peaks(INT4_KEPT, 2 * LIMIT, 1)],
            {},
            "peak memory is above 4000 MB",
        ),
        ({KEPT: 0.5}, [], {"losses": 7.9}, "its losses are not those of the start"),
        ({KEPT: 0.5}, [], {"losses": 7.3}, "its losses are not those of the start"),
        # one of its codecs was trained with
        ({BOTH_INT8: 0.5}, [], {}, "its perplexity was not measured"),
    ],
)
def test_what_is_not_held_has_a_reason(figures, runs, how, reason):
    decision = last(figures, *runs, **how)
    assert (decision.decision, decision.held) == ("reject", FSDP2.hash())
    assert reason in decision.reason


def test_losses_count_where_an_arm_computes_what_the_start_does():
    before = after({KEPT: 0.5, DDP: 0.8}, losses=7.9)
    assert best_measured(before, 0.03, LIMIT, {}).hash == FSDP2.hash(), (
        "no later choice holds it either"
    )
    assert last({DDP_INT8: 0.5}, losses=7.9).decision == "accept"


def test_what_fits_replaces_an_incumbent_that_does_not_even_if_it_is_slower():
    decision = last({DDP: 1.8, KEPT: 1.4}, fits=False)
    assert (decision.decision, decision.held, decision.fits) == ("accept", KEPT.hash(), True)
    assert decision.reason.endswith("; the incumbent's peak memory is above 4000 MB")
    large = trained(INT4_KEPT, memory_peak_bytes=2 * LIMIT)
    decision = last({INT4_KEPT: 1.2}, large, fits=False)
    assert (decision.decision, decision.held, decision.fits) == ("reject", FSDP2.hash(), False)


def test_peaks_of_training_on_other_ranks_are_none_of_the_search():
    load = HISTORY.workload.model_copy(update={"world_size": 4})
    on_four = HISTORY.model_copy(update={"workload": load})
    large = trained(INT4_KEPT, memory_peak_bytes=2 * LIMIT)
    assert last({INT4_KEPT: 0.5}, large, history=on_four).held == INT4_KEPT.hash()


@pytest.mark.parametrize(
    ("steps", "fits", "quality", "expected"),
    [
        # the fastest first, until one is as good as is tolerated
        ((0.5, 0.8), True, 1.029, [INT4_KEPT]),
        ((0.8, 0.5), True, 1.029, [BOTH_INT8]),
        ((0.5, 0.8), True, 1.031, [INT4_KEPT, BOTH_INT8]),
        ((0.5, 1.5), True, 1.031, [INT4_KEPT]),
        ((1.5, 1.2), True, 1.0, []),
        # a slower one may take the place of what does not fit
        ((1.5, 1.2), False, 1.029, [BOTH_INT8]),
        ((1.5, 1.2), False, 1.031, [BOTH_INT8, INT4_KEPT]),
    ],
)
def test_what_may_be_held_is_trained_until_one_is_good_enough(steps, fits, quality, expected):
    arms = dict(zip((INT4_KEPT, BOTH_INT8), steps, strict=True))
    proposal = proposal_of(HISTORY, *arms).model_copy(update={"fits": fits})
    race = trial_of(proposal, **{key(arm): step for arm, step in arms.items()}).race

    def measure(arm: Candidate, seed: int, left_s: float) -> TrainResult:
        run = trial_run(arm.strategy, seed)
        return run.model_copy(update={"val_ppl": quality * run.val_ppl})

    results = train_promising(race, proposal, AGENT, [0, 1], measure)
    runs = [(arm.hash(), seed) for arm in expected for seed in (0, 1)]
    assert [(result.run, result.seed) for result in results] == runs


def test_quality_is_compared_with_the_start_and_steps_with_the_incumbent():
    first = after({DDP_INT8: 0.5})
    assert first.incumbent == DDP_INT8.hash()
    assert last({DDP: 0.8}, history=first).held == DDP.hash()
    worse = trained(INT4_KEPT, 1.031)
    assert last({INT4_KEPT: 0.8}, worse, history=first).held == DDP_INT8.hash()


def test_steps_of_all_arms_are_known_afterwards_over_those_of_the_start():
    history = after({DDP: 0.5, KEPT: 1.5}, history=after({DDP_INT8: 0.5}))
    for strategy, ratio in ((DDP_INT8, 1.0), (DDP, 0.5), (KEPT, 1.5)):
        steps = history.measured[strategy.hash()].steps[-1]
        assert (steps.source, steps.repetitions) == ("round 2", 40)
        assert steps.ratio == pytest.approx(ratio, rel=0.02)
    assert [*history.races] == ["round-1", "round-2"]


def test_the_best_that_is_known_and_fits_takes_the_place_of_an_incumbent_that_fails():
    before = after({DDP: 0.5, KEPT: 0.7})
    proposal = proposal_of(before, INT4_KEPT)
    trial = trial_of(proposal, **{key(DDP): "memory"})
    history = conclude(before, proposal, trial, AGENT)
    assert (history.incumbent, history.rounds[-1].decision) == (KEPT.hash(), "reject")
    assert "the incumbent ended with outcome memory: by test" in history.rounds[-1].reason
    proposal = proposal.model_copy(update={"peaks": {KEPT.hash(): 2 * LIMIT}})
    assert conclude(before, proposal, trial, AGENT).incumbent == FSDP2.hash()


def test_a_round_without_a_race_holds_what_the_proposal_does_and_has_a_reason():
    proposal = proposal_of(HISTORY.model_copy(update={"incumbent": DDP.hash()}))
    history = conclude(HISTORY, proposal, trial_of(proposal), AGENT)
    assert (history.incumbent, history.measured) == (DDP.hash(), HISTORY.measured)
    assert history.rounds[-1].decision == "none"
    assert history.rounds[-1].reason == "nothing was raced: by test"


def test_the_trial_of_another_proposal_is_refused():
    raced, unraced = proposal_of(HISTORY, DDP), proposal_of(HISTORY)
    of_other_incumbent = proposal_of(after({DDP: 0.5}), KEPT)
    for proposal, other in (raced, unraced), (unraced, raced), (raced, of_other_incumbent):
        with pytest.raises(UserError, match="run the trial again"):
            conclude(HISTORY, proposal, trial_of(other), AGENT)


def test_a_race_that_had_no_time_rolls_back_and_says_so():
    proposal = proposal_of(HISTORY, DDP)
    trial = trial_of(proposal)
    race = trial.race.model_copy(update={"arms": {}, "runs": [], "reason": "no time was left"})
    last = conclude(HISTORY, proposal, trial.model_copy(update={"race": race}), AGENT)
    assert last.incumbent == HISTORY.incumbent
    reason = "nothing was raced: no time was left"
    assert (last.rounds[-1].decision, last.rounds[-1].reason) == ("reject", reason)
