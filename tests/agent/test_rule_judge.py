from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.agent.proposals.judge import RuleJudge
from shardlab.agent.records.history import History, initial_history
from shardlab.records.run import Record
from tests.agent.searches import ask, begin, candidate
from tests.record_factory import make_record

CANDIDATES = [
    candidate(wrap="root"),
    candidate(reshard_after_forward=False),
    candidate(engine="ddp", bucket_mb=5.0),
    candidate(gradients={"codec": "int8:group=512"}),
    candidate(gradients={"codec": "topk:density=0.01", "error_feedback": True}),
]


def with_terms(history: History, **terms: float) -> History:
    measurements = [each.model_copy(update=terms) for each in history.incumbent.measurements]
    incumbent = history.incumbent.model_copy(update={"measurements": measurements})
    return history.model_copy(update={"incumbent": incumbent})


@settings(max_examples=25, deadline=None)
@given(st.permutations(CANDIDATES))
def test_verdict_does_not_depend_on_the_order(candidates):
    history = begin()
    verdict = RuleJudge().choose(ask(history, *candidates))
    assert verdict == RuleJudge().choose(ask(history, *CANDIDATES))
    assert verdict.choice in {each.id for each in CANDIDATES}


def test_exposed_communication_selects_a_codec():
    history = with_terms(begin(["fsdp2"]), exposed_comm_ms=20.0, idle_ms=1.0)
    verdict = RuleJudge().choose(ask(history, *CANDIDATES[:4]))
    assert verdict.choice == CANDIDATES[3].id
    assert "exposed communication is the largest term" in verdict.reason
    assert "codec: none to int8:group=512" in verdict.reason


def test_codec_of_the_kind_with_more_bytes_comes_first():
    gradients, weights = CANDIDATES[3], candidate(weights={"codec": "int8"})
    for moved, wanted in ((5e6, weights), (1e6, gradients)):
        history = with_terms(
            begin(["fsdp2"]),
            exposed_comm_ms=20.0,
            idle_ms=1.0,
            gradients_bytes_wire=2.6e6,
            weights_bytes_wire=moved,
        )
        verdict = RuleJudge().choose(ask(history, gradients, weights))
        assert verdict.choice == wanted.id
        assert f"2.600 MB of gradients and {moved / 1e6:.3f} MB of weights" in verdict.reason


def test_removing_a_codec_does_not_act_on_communication():
    coded = document(weights={"codec": "int8"}, gradients={"codec": "bf16"})
    record = make_record("coded", 0, strategy=coded)
    history = with_terms(initial_history([record], "coded"), exposed_comm_ms=20.0, idle_ms=1.0)
    plain = candidate(gradients={"codec": "bf16"})
    wider = candidate(wrap="root", weights={"codec": "int8"}, gradients={"codec": "bf16"})
    assert RuleJudge().choose(ask(history, plain, wider)).choice == wider.id
    alone = RuleJudge().choose(ask(history, plain))
    assert "weights: int8:group=128 to none does not act on it" in alone.reason


def test_idle_time_selects_fewer_units():
    history = with_terms(begin(["fsdp2"]), exposed_comm_ms=1.0, idle_ms=20.0)
    assert RuleJudge().choose(ask(history, *CANDIDATES)).choice == CANDIDATES[0].id


def measured(*records: Record, **steps: float) -> History:
    """A search from fsdp2, of which runs (`_` for `-`) were measured with these step times."""
    runs = [measured_run(name.replace("_", "-"), step) for name, step in steps.items()]
    return initial_history([*runs, *records], "fsdp2")


def measured_run(name: str, step: float, ppl: float = 180.0, **changes: Any) -> Record:
    return make_record(name, 0, step_ms_p50=step, val_ppl=ppl, **changes)


def document(**settings: Any) -> dict[str, Any]:
    return candidate(**settings).strategy.model_dump(mode="json")


def kept_everywhere(step: float, ppl: float) -> History:
    """fsdp2 and its bf16 twin are measured, and the twin also with parameters kept."""
    strategy = document(reshard_after_forward=False, gradients={"codec": "bf16"})
    kept = measured_run("kept", step, ppl, strategy=strategy)
    return measured(kept, fsdp2=50.0, fsdp2_bf16=50.0)


def test_change_measured_as_faster_precedes_unmeasured_ones():
    history = kept_everywhere(step=40.0, ppl=180.0)
    verdict = RuleJudge().choose(ask(history, *CANDIDATES))
    assert verdict.choice == CANDIDATES[1].id
    assert "steps took 0.800 times as long" in verdict.reason


def test_change_measured_as_slower_or_worse_is_excluded():
    for history in (kept_everywhere(60.0, 180.0), kept_everywhere(40.0, 200.0)):
        alone = RuleJudge().choose(ask(history, CANDIDATES[1]))
        assert alone.choice is None
        assert "slower or worse" in alone.reason
        assert RuleJudge().choose(ask(history, *CANDIDATES)).choice != CANDIDATES[1].id


def test_codec_effect_is_looked_up_by_name_without_options():
    verdict = RuleJudge().choose(ask(measured(ddp=40.0, ddp_int8=36.0, fsdp2=50.0), *CANDIDATES))
    assert verdict.choice == CANDIDATES[3].id  # int8 with other groups
    assert "steps took 0.900 times as long" in verdict.reason


def test_faster_of_two_measured_changes_wins():
    history = kept_everywhere(step=40.0, ppl=180.0)
    entry = initial_history([measured_run("fsdp2-int8", 30.0)], "fsdp2-int8").incumbent
    history = history.model_copy(update={"measured": {**history.measured, entry.hash: entry}})
    kept, codec = CANDIDATES[1], CANDIDATES[3]
    for offered in ((kept, codec), (codec, kept)):
        assert RuleJudge().choose(ask(history, *offered)).choice == codec.id


def test_effects_of_sharding_and_of_gradients_add_up():
    both = candidate(engine="ddp", gradients={"codec": "int8"})
    verdict = RuleJudge().choose(ask(measured(fsdp2=50.0, fsdp2_int8=45.0, ddp=40.0), both))
    assert f"steps took {0.9 * 0.8:.3f} times as long" in verdict.reason


def test_effect_of_a_weight_codec_is_looked_up_separately():
    coded = measured_run("w8", 40.0, strategy=document(weights={"codec": "int8"}))
    history = measured(coded, fsdp2=50.0, fsdp2_int8=45.0)
    both = candidate(weights={"codec": "int8:group=64"}, gradients={"codec": "int8"})
    verdict = RuleJudge().choose(ask(history, both))
    assert f"steps took {0.9 * 0.8:.3f} times as long" in verdict.reason


def test_abstains_when_no_term_is_worth_an_action():
    history = with_terms(begin(["fsdp2"]), exposed_comm_ms=0.5, idle_ms=0.5)
    verdict = RuleJudge().choose(ask(history, *CANDIDATES))
    assert verdict.choice is None
    assert "is 0.8% of a traced step" in verdict.reason
