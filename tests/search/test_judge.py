"""The rule that judges predictions."""

from hypothesis import given
from hypothesis import strategies as st

from shardlab.search.judge import RuleJudge
from shardlab.search.rounds import Candidate
from tests.record_factory import make_candidate
from tests.search.searches import ask

RULES = RuleJudge()


def offer(number: int, step: tuple[float, ...] = (), quality: float | None = 1.0) -> Candidate:
    """A candidate with the step (low, expected, high) in ms."""
    low, expected, high = step or (None, None, None)
    made = make_candidate(engine="ddp", bucket_mb=1.0 + number)
    figures = {"low_ms": low, "step_ms": expected, "high_ms": high, "perplexity_ratio": quality}
    return made.model_copy(update={"prediction": made.prediction.model_copy(update=figures)})


HELD = offer(99, (38, 40, 42))
SURE, RISKY = offer(0, (30, 31, 32)), offer(1, (20, 30, 41))
UNTRAINED, UNTIMED = offer(2, (24, 25, 26), quality=None), offer(3)
POSSIBLE, SLOW = offer(4, (39, 41, 43)), offer(5, (50, 55, 60))


@given(st.permutations([SURE, RISKY, UNTRAINED, UNTIMED, POSSIBLE, SLOW]), st.integers(1, 6))
def test_the_first_kind_that_there_is_decides_whatever_the_order(candidates, count):
    offered = candidates[:count]
    ranked = [SURE, RISKY, UNTRAINED, UNTIMED, POSSIBLE]
    wanted = next((each.id for each in ranked if each in offered), None)
    assert RULES.choose(ask(*offered, held=HELD)).choice == wanted


def test_reasons_cite_the_prediction():
    reason = RULES.choose(ask(SURE, RISKY, held=HELD)).reason
    assert reason == (
        "ddp, none, buckets of 1 MiB: the lowest upper end of a predicted step, 32.0 ms (31.0 ms "
        "expected, and 40.0 ms for the incumbent)"
    )
    reason = RULES.choose(ask(UNTRAINED, held=HELD)).reason
    assert reason == f"{UNTRAINED.label}: {UNTRAINED.prediction.note}"
    slower = offer(6, (50, 55, 60), quality=None)
    assert RULES.choose(ask(SLOW, slower, held=HELD)).reason.startswith("abstains: no candidate")


def test_an_incumbent_without_prediction_is_no_limit():
    assert RULES.choose(ask(SLOW, UNTIMED, held=offer(7))).choice == SLOW.id
