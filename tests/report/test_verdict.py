"""The verdict recommends nothing that is not shown, and says what one device alone does."""

import ast
import re
from dataclasses import replace

import pytest
import yaml

from shardlab.report.answer import answer, snippet
from shardlab.report.sections.search import search
from shardlab.results.timing_result import NO_COMMUNICATION
from shardlab.strategy.document import parse_strategy
from tests.evidence_factory import make_evidence
from tests.record_factory import HOST, STRATEGIES, make_history, make_record, trial_run
from tests.timed_run_factory import make_timed

DRIFT = [20.0, 40.0, 25.0, 90.0]
RUNS = ["fsdp2", "ddp", "fsdp2-int8"]
INT8 = "fsdp2-int8"


def slow(steps, **changes):
    """The timing on the slow link; each run takes so many times as long in every repetition."""
    return [
        make_timed("slow", run, step_ms=[times * step for step in DRIFT], **changes)
        for run, times in steps.items()
    ]


def beside_one(steps, **changes):
    """The same, in turns with one rank that computes as fast as all at once do."""
    return [*slow(steps, **changes), make_timed("one-rank", NO_COMMUNICATION, 1, step_ms=DRIFT)]


def trained(perplexities, runs=RUNS):
    """Records of three seeds; runs have a perplexity by seed in times of the baseline's."""
    return [
        make_record(run, seed, val_ppl=100.0 * (1 + seed) * times)
        for run in runs
        for seed, times in enumerate(perplexities.get(run, [1.0] * 3))
    ]


def verdict(steps, perplexities=None, **changes):
    """The line on the slow link."""
    records = trained(perplexities or {}, [run for run in RUNS if run in steps])
    timed = beside_one(steps, **changes.pop("of_timing", {}))
    return answer(make_evidence(records, timed=timed, **changes)).lines[0]


ALONE = {NO_COMMUNICATION: 1.0}


def test_the_fastest_tolerated_strategy_is_compared_with_baseline_and_one_device():
    text = verdict({"fsdp2": 6.0, "ddp": 4.0, INT8: 1.5, **ALONE}, {INT8: [1.002, 1.004, 1.003]})
    assert text.startswith("2 ranks at 100 Mbit/s (tiny, 1.31 M parameters, 512 tokens per rank ")
    assert f"): use {INT8}: 4.0 times as fast as fsdp2, " in text
    # 1.5 steps of one rank for the tokens of two
    assert "1.33 times as fast as one device alone, perplexity +0.3 % (+0.1 to +0.5)" in text
    assert "; without any loss: one device alone (ddp takes 2.00 times as long)." in text


def test_train_on_one_device_where_the_link_eats_what_the_others_give():
    text = verdict({"fsdp2": 6.0, INT8: 3.0, **ALONE}, {INT8: [1.002, 1.004, 1.003]})
    assert ": train on one device: the link eats what the second gives. fsdp2-int8, " in text
    assert text.endswith("takes 1.50 times as long for as many tokens.")
    records = trained({}, ["fsdp2"])
    timed = beside_one({"fsdp2": 6.0, **ALONE}, world_size=4, host={**HOST, "cores": 4})
    lines = answer(make_evidence(records, timed=timed)).lines
    assert any("the link eats what the other 3 give" in line for line in lines)


@pytest.mark.parametrize(
    ("perplexity", "words"),
    [
        ([1.1, 1.1, 1.1], "perplexity +10.0 %"),
        # the mean is within the tolerance, and the interval is not
        ([1.0, 1.0, 1.06], "perplexity +2.0 % (-6.2 to +10.8)"),
        ([None, 1.0, 1.0], "perplexity not measured"),
    ],
)
def test_a_strategy_is_not_recommended_above_the_tolerance(perplexity, words):
    records = trained({INT8: [times or 1.0 for times in perplexity]})
    if None in perplexity:
        records = [record for record in records if record.run != INT8]
    steps = beside_one({"fsdp2": 6.0, "ddp": 1.8, INT8: 1.5, **ALONE})
    [text, *_] = answer(make_evidence(records, timed=steps)).lines
    assert "use ddp: 3.3 times as fast as fsdp2" in text and "without any loss" in text
    assert f"Faster, and not recommended: {INT8} ({words}" in text.replace("\N{MINUS SIGN}", "-")


@pytest.mark.parametrize(
    ("step", "ending"), [(1.5, f" Faster, and not recommended: {INT8}"), (3, "")]
)
def test_one_device_is_recommended_where_nothing_on_several_may_be_used(step, ending):
    records = trained({INT8: [1.1] * 3})
    timed = beside_one({INT8: step, **ALONE})
    [text, *_] = answer(make_evidence(records, timed=timed)).lines
    advice = "): train on one device: nothing on several can be recommended."
    assert f"{advice}{ending}" in text and text.endswith(".") and ("Faster" in text) == bool(ending)


def test_where_nothing_can_be_recommended_slower_strategies_are_not_called_faster():
    evidence = make_evidence(trained({INT8: [1.1] * 3}), timed=slow({INT8: 1.5, **ALONE}))
    [text, *_] = answer(evidence).lines
    assert f": no strategy can be recommended. Not recommended: {INT8} (perplexity" in text


def test_one_seed_shows_no_tolerated_perplexity():
    records = [make_record(run, val_ppl=100.0) for run in RUNS]
    timed = beside_one({"fsdp2": 6.0, "ddp": 1.8, INT8: 1.5, **ALONE})
    [text, *_] = answer(make_evidence(records, timed=timed)).lines
    assert "use ddp" in text and f"not recommended: {INT8} (perplexity 0.0 %, in one seed)" in text


def test_loss_needs_a_step_that_is_shown_to_be_shorter():
    runs = beside_one({"fsdp2": 6.0, "ddp": 1.5, **ALONE})
    runs += [make_timed("slow", INT8, step_ms=[10.0, 60.0, 20.0, 140.0])]
    [text, *_] = answer(make_evidence(trained({}), timed=runs)).lines
    assert "use ddp" in text and "Faster" not in text


def test_quality_of_other_ranks_says_nothing():
    steps = {"fsdp2": 6.0, "ddp": 1.8, INT8: 1.5, **ALONE}
    evidence = make_evidence(trained({}), timed=slow(steps, world_size=4))
    [line] = [line for line in answer(evidence).lines if line.startswith("4 ranks")]
    assert "use ddp" in line and f"{INT8} (perplexity not measured)" in line


def test_what_is_not_shown_to_be_faster_than_one_device_is_an_alternative():
    runs = beside_one({"fsdp2": 6.0, **ALONE})
    runs += [make_timed("slow", "ddp", step_ms=[25.0, 120.0, 30.0, 260.0])]
    [text, *_] = answer(make_evidence(trained({}, RUNS[:2]), timed=runs)).lines
    assert ": one device alone, or ddp, which is not shown to be faster: " in text
    single = [run.model_copy(update={"step_ms": run.step_ms[:1]}) for run in runs]
    [text, *_] = answer(make_evidence(trained({}, RUNS[:2]), timed=single)).lines
    assert "one device alone, without an interval" in text


def test_ranks_at_once_are_not_taken_for_one_device():
    steps = {"fsdp2": 6.0, "ddp": 4.0, **ALONE}
    records = trained({}, ["fsdp2", "ddp"])
    [text, *_] = answer(make_evidence(records, timed=slow(steps))).lines
    assert "not compared with one device alone (not timed in the same turns)" in text
    # nor one of another file, between which a machine drifts
    turns = {"slow": "slow", "one-rank": "one-rank", "two-ranks": "two-ranks"}
    evidence = make_evidence(records, timed=beside_one(steps), turns=turns)
    assert "(not timed in the same turns)" in answer(evidence).lines[0]


def test_ranks_that_share_cores_are_not_compared_with_one_device():
    timed = beside_one({"fsdp2": 3.0, "ddp": 1.5, **ALONE}, world_size=4)
    lines = answer(make_evidence(trained({}, ["fsdp2", "ddp"]), timed=timed)).lines
    [line] = [line for line in lines if line.startswith("4 ranks at 100 Mbit/s on 2 cores")]
    assert "not compared with one device alone (the ranks share cores)" in line
    assert "times as fast as one device" not in line


def test_a_run_that_failed_is_not_recommended():
    steps = {"fsdp2": 6.0, "ddp": 1.5, **ALONE}
    assert "use ddp" in verdict(steps)
    assert "ddp" not in verdict(steps, lost={"ddp"})


def raced(ratio, perplexity, again=(), **changes):
    """A search that holds a strategy which no timing has; its steps are so many times the bound,
    and in more races so many times."""
    strategy = parse_strategy(
        {"engine": "ddp", "gradients": {"codec": "int4", "error_feedback": True}}
    )
    held, canonical = strategy.hash(), strategy.canonical()
    records = trained({})
    history = make_history(records)
    place = {"link": "100mbit", "world_size": 2}
    last = history.rounds[0].model_copy(update={"held": held, **place, **changes})
    names = {held: ratio, records[0].strategy_hash: 6.0, NO_COMMUNICATION: 1.0}
    races = []
    for number, times in enumerate((ratio, *again), 1):
        first, *others = (
            run.model_copy(update={"run": name, "kind": "race", "timing": f"round-{number}"})
            for name, run in zip(names, slow({**names, held: times}), strict=True)
        )
        form = {"strategy": canonical.model_dump(mode="json"), "strategy_hash": held}
        races.append(first.model_copy(update=form))
        # arms leave a race at different times
        others[0] = others[0].model_copy(update={"step_ms": others[0].step_ms[:2]})
        races += others
    own = [trial_run(strategy, seed, val_ppl=100.0 * (1 + seed) * perplexity) for seed in range(3)]
    history = history.with_results([*own, *races])
    update = {"rounds": [last], "incumbent": held}
    return make_evidence(
        records,
        timed=beside_one({"fsdp2": 6.0, "ddp": 4.0, INT8: 1.5, **ALONE}),
        history=history.model_copy(update=update),
    )


def test_what_the_search_holds_is_a_candidate_on_its_link():
    found = answer(raced(1.2, 1.01))
    assert (
        "use found-by-search (ddp, int4:group=128, error_feedback; timed in 1 race): "
        in found.lines[0]
    )
    assert "5.0 times as fast as fsdp2, 1.67 times as fast as one device alone" in found.lines[0]
    assert next(iter(found.snippets)) == "found-by-search"
    others = raced(1.7, 1.01), raced(1.2, 1.2), raced(1.2, 1.01, link="1gbit")
    for slower in (*others, raced(1.2, 1.01, fits=False)):
        assert f"use {INT8}: " in answer(slower).lines[0]
    assert (
        "not recommended: found-by-search (perplexity +20.0 %" in answer(raced(1.2, 1.2)).lines[0]
    )


def test_a_strategy_of_several_races_counts_in_all_of_them():
    """A reader of the last one alone would expect what another one refutes."""
    [line, *_] = answer(raced(1.25, 1.01, again=(1.0, 0.8))).lines
    assert "found-by-search (ddp, int4:group=128, error_feedback; timed in 3 races): " in line
    # by the least and the largest one
    assert "2.00 (1.60 to 2.50) times as fast as one device alone" in line
    # one race in which it is slower than another strategy leaves open which is faster
    [line, *_] = answer(raced(1.2, 1.01, again=(1.7,))).lines
    assert "Not told apart from it: " in line and "found-by-search" in line and INT8 in line


NOISE = [1.0, 1.02, 0.97, 1.01]


@pytest.mark.parametrize(
    ("steps", "used", "same"),
    [
        # the mean of another engine is smaller
        ({"fsdp2": 1.5, "ddp": 1.3, "manual": 1.299, "slide": 1.298}, "ddp", "slide, manual"),
        ({"fsdp2": 1.3, "ddp": 1.5, "manual": 1.299, "slide": 1.1}, "slide", ""),
        ({"fsdp2": 1.3, "ddp": 1.5, "manual": 1.299, "slide": 1.4}, "fsdp2", "manual"),
        ({"fsdp2": 1.3, "ddp": 1.301, "manual": 1.5, "slide": 1.5}, "ddp", "fsdp2"),
        # a codec that is not shown to save time
        ({"fsdp2": 1.5, "ddp": 1.3, "manual": 1.5, INT8: 1.299}, "ddp", ""),
    ],
)
def test_another_engine_or_codec_is_used_where_it_is_shown_to_be_faster(
    monkeypatch, steps, used, same
):
    for engine in ("manual", "slide"):
        monkeypatch.setitem(STRATEGIES, engine, {"engine": engine})
    records = trained({}, [*steps])
    noises = [NOISE[shift:] + NOISE[:shift] for shift in range(4)]
    runs = beside_one(ALONE) + [
        make_timed("slow", run, step_ms=[t * s * n for s, n in zip(DRIFT, noise, strict=True)])
        for (run, t), noise in zip(steps.items(), noises, strict=False)
    ]
    [line, *_] = answer(make_evidence(records, timed=runs)).lines
    assert f": use {used}: " in line
    assert (f" Not told apart from it: {same}." in line) if same else "told apart" not in line


def test_a_strategy_has_the_quality_of_one_that_computes_the_same_but_not_its_memory(monkeypatch):
    form = {"engine": "ddp", "bucket_mb": 5.0, "gradients": {"codec": "int8:group=128"}}
    monkeypatch.setitem(STRATEGIES, "buckets", form)
    records = trained({"ddp-int8": [1.002, 1.004, 1.003]}, ["fsdp2", "ddp-int8"])
    steps = {"fsdp2": 6.0, "ddp-int8": 1.8, **ALONE}
    [own, *_] = answer(make_evidence(records, timed=beside_one(steps))).lines
    assert "memory per rank" in own and "perplexity +0.3 %" in own
    timed = beside_one({**steps, "buckets": 1.2})
    [line, *_] = answer(make_evidence(records, timed=timed)).lines
    assert ": use buckets: " in line and "perplexity +0.3 % (+0.1 to +0.5)" in line
    assert "memory per rank" not in line


def test_a_run_that_did_not_train_is_named_by_how_much_worse_it_became():
    worse = [make_record("ddp", s, val_ppl=4000.0, untrained_ppl=2000.0) for s in range(3)]
    [text] = answer(make_evidence([*trained({}, ["fsdp2"]), *worse])).warnings
    assert text == "At least one run failed to train: its perplexity grew 2.00 times."


def test_each_verdict_names_the_model_its_tokens_and_the_ratio_of_the_link(monkeypatch):
    text = verdict({"fsdp2": 6.0, "ddp": 4.0, **ALONE})
    named = "(tiny, 1.31 M parameters, 512 tokens per rank and step, synchronisation / computation"
    # a step of DDP is four of computation
    assert f"{named} 3.0): " in text
    # whatever others take, which compress or exchange rarely
    monkeypatch.setitem(STRATEGIES, "rare", {"engine": "ddp", "sync": {"every": 8}})
    route = {"codec": "none", "route": "exchange"}
    monkeypatch.setitem(STRATEGIES, "exchange", {"engine": "ddp", "gradients": route})
    steps = {"fsdp2": 6.0, "rare": 1.2, "exchange": 5.0, "ddp-int8": 2.0, "ddp": 4.0, **ALONE}
    records, timed = trained({}, ["fsdp2", "ddp-int8", "ddp"]), beside_one(steps)
    assert f"{named} 3.0): " in answer(make_evidence(records, timed=timed)).lines[0]
    text = verdict({"fsdp2": 6.0, **ALONE})
    assert f"{named} unknown, as stock DDP was not timed): " in text


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (None, None),
        (100, "Too few parameter synchronisations (11 in 100 steps) to judge `sync`: "),
        (2000, None),
    ],
)
def test_short_runs_do_not_judge_parameter_synchronisation(steps, words):
    records = trained({})
    if steps:
        sync = {"engine": "ddp", "sync": {"every": 8, "warmup_steps": 8}}
        changes = {"strategy": parse_strategy(sync).canonical().model_dump(mode="json")}
        records += [make_record("rare", steps=steps, **changes)]
    evidence = make_evidence(records, timed=beside_one({"fsdp2": 6.0, "ddp": 4.0, **ALONE}))
    lines = [line for line in answer(evidence).reasons if "`sync`" in line]
    assert [line.partition(words)[0] for line in lines] == ([""] if words else [])


def test_what_is_shown_to_beat_one_device_comes_before_what_is_not(monkeypatch):
    """An engine of this project with a tight interval, beside one of torch with a wide one."""
    monkeypatch.setitem(STRATEGIES, "manual", {"engine": "manual"})
    wide = [0.8, 1.3, 0.75, 1.25]
    runs = [
        make_timed("slow", "fsdp2", step_ms=[6 * step for step in DRIFT]),
        make_timed("slow", "manual", step_ms=[1.85 * step for step in DRIFT]),
        make_timed("slow", "ddp", step_ms=[1.9 * s * n for s, n in zip(DRIFT, wide, strict=True)]),
        *beside_one(ALONE),
    ]
    [line, *_] = answer(make_evidence(trained({}, ["fsdp2", "ddp", "manual"]), timed=runs)).lines
    assert ": use manual: " in line
    assert "1.08 times as fast as one device alone" in line
    assert " Not told apart from it: ddp." in line


def test_a_search_that_raced_nothing_is_named_on_top():
    history = make_history(trained({}))
    assert answer(make_evidence(trained({}))).warnings == []
    lost = history.rounds[0].model_copy(update={"compared": history.rounds[0].compared[1:]})
    update = {"rounds": [lost]}
    evidence = make_evidence(trained({}), history=history.model_copy(update=update))
    assert answer(evidence).warnings[0].endswith(" (raise agent.trial_timeout_s).")
    rounds = [history.rounds[1].model_copy(update={"round": 1, "link": "100mbit"})]
    evidence = make_evidence(trained({}), history=history.model_copy(update={"rounds": rounds}))
    assert answer(evidence).warnings == [
        "Nothing was raced on 2 ranks with link 100mbit, so the search adds nothing: no candidate "
        "is left."
    ]
    unsearched = replace(evidence, is_searched=False)
    assert answer(unsearched).warnings == []
    assert search(evidence) is not None and search(unsearched) is None


def test_what_is_to_be_pasted_is_the_strategy():
    strategy = parse_strategy(STRATEGIES["fsdp2-int4"]).canonical()
    entry, _, script = snippet("a", strategy).partition("# in a script")
    assert parse_strategy(yaml.safe_load(entry)["strategies"]["a"]).hash() == strategy.hash()
    assert strategy.attach_call() in script


def test_what_is_to_be_pasted_of_a_streamed_strategy_is_its_mapping():
    settings = {"engine": "slide", "window": 3, "gradients": "int8"}
    strategy = parse_strategy(settings).canonical()
    _, _, script = snippet("a", strategy).partition("# in a script")
    pasted = re.search(r"^sliding = shardlab\.SlideFSDP\(model, (.*)\)$", script, re.M)
    assert pasted and parse_strategy(ast.literal_eval(pasted[1])).hash() == strategy.hash()
    assert "attach(" not in script
