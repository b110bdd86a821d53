"""What the search knows: of records, of timings, and of quality by what computes alike."""

import math

import pytest

from shardlab.choose.decision import conclude
from shardlab.choose.experiment import ranking_text
from shardlab.choose.history import History, initial_history, load_history
from shardlab.choose.incumbent import best_measured, with_best_incumbent
from shardlab.choose.settings import Agent
from shardlab.core.errors import UserError
from shardlab.results.result import Failure
from shardlab.results.timing_result import NO_COMMUNICATION
from shardlab.strategy.document import CanonicalStrategy, parse_strategy
from shardlab.train.settings import Train
from tests.choose.searches import (
    AGENT,
    DDP,
    DDP_INT8,
    FSDP2,
    KEPT,
    LIMIT,
    begin,
    failed,
    proposal_of,
    trained,
    trial_of,
)
from tests.record_factory import FIGURES, STRATEGIES, make_record, make_records
from tests.timed_run_factory import make_timed

START = FIGURES["fsdp2"][2]
INT8 = {"codec": "int8:group=128"}


def canonical(**document: object) -> CanonicalStrategy:
    return parse_strategy(document).canonical()


def test_the_matrix_is_known_and_without_timings_the_start_is_held():
    history = begin()
    assert {*history.measured} == {
        parse_strategy(document).hash() for document in STRATEGIES.values()
    }
    assert history.incumbent_results.source == "run fsdp2"
    assert history.start == history.incumbent
    assert [record.seed for record in history.incumbent_results.trained] == [0, 1]


def test_two_names_of_one_meaning_are_one_strategy_named_after_the_start():
    twin = [make_record("another-name", seed) for seed in range(2)]
    history = initial_history([*twin, *make_records(["fsdp2"])], [], AGENT, Train())
    assert [entry.source for entry in history.measured.values()] == ["run fsdp2"]


def test_steps_are_of_timings_with_the_start_on_ranks_and_link_of_the_search():
    timed = [
        make_timed(name, run, ranks, step_ms=[ms] * 5)
        for name, ranks, runs in (
            ("two-ranks", 2, {NO_COMMUNICATION: 5.0, "fsdp2": 50.0, "ddp": 40.0, "ddp-int8": 60.0}),
            ("slow", 2, {"fsdp2": 500.0, "ddp": 600.0, "ddp-int8": 200.0}),
            ("four", 4, {"fsdp2": 50.0, "ddp": 10.0}),
            ("alone", 2, {"ddp": 10.0, NO_COMMUNICATION: 5.0}),
        )
        for run, ms in runs.items()
    ]
    # of other steps than those that were trained
    timed += [
        make_timed("slow-4", run, step_ms=[ms] * 5, accumulation=4, link="100mbit")
        for run, ms in (("fsdp2", 900.0), ("ddp", 100.0))
    ]
    for link, ddp, coded, best in ((None, 0.8, 1.2, "run ddp"), ("100mbit", 1.2, 0.4, "ddp-int8")):
        agent = Agent.model_validate({"start": "fsdp2", "link": link and {"rate": link}})
        history = begin(timed=timed, agent=agent)
        rows = [history.measured[strategy.hash()] for strategy in (DDP, DDP_INT8, FSDP2)]
        ratios = [row.step(history.workload).ratio for row in rows]
        assert ratios == pytest.approx([ddp, coded, 1])
        assert history.incumbent_results.source.endswith(best)
        assert history.start == FSDP2.hash()


def test_what_was_timed_alone_is_held_only_with_tolerated_perplexity():
    slide = parse_strategy({"engine": "slide"})
    topk = parse_strategy(STRATEGIES["fsdp2-topk"])
    for strategy, incumbent in ((slide, slide), (topk, FSDP2)):
        form = strategy.canonical().model_dump(mode="json")
        fields = {"strategy": form, "strategy_hash": strategy.hash()}
        timed = [make_timed("two-ranks", step_ms=[40.0] * 5)]
        timed += [make_timed("two-ranks", step_ms=[20.0] * 5).model_copy(update=fields)]
        history = begin(timed=timed)
        assert history.incumbent == incumbent.hash()
        assert [step.ratio for step in history.measured[strategy.hash()].steps] == [0.5]


@pytest.mark.parametrize(
    ("strategy", "ratio", "source", "sure"),
    [
        (KEPT.canonical(), 1.0, "computes what the start computes", True),
        (DDP_INT8.canonical(), FIGURES["ddp-int8"][2] / START, "its own: run ddp-int8", True),
        (
            canonical(engine="ddp", bucket_mb=5.0, gradients=INT8),
            math.sqrt(FIGURES["ddp-int8"][2] * FIGURES["fsdp2-int8"][2]) / START,
            "the same numerics: run ddp-int8, run fsdp2-int8",
            True,
        ),
        (
            canonical(engine="manual", gradients=INT8),
            FIGURES["fsdp2-int8"][2] / START,
            "its codecs, or a part of them: run fsdp2-int8",
            False,
        ),
        (
            canonical(
                engine="manual", gradients=STRATEGIES["fsdp2-topk"]["gradients"], weights=INT8
            ),
            FIGURES["fsdp2-topk"][2] / START,
            "its codecs, or a part of them: run fsdp2-topk",
            False,
        ),
    ],
)
def test_quality_is_that_of_what_computes_most_alike(strategy, ratio, source, sure):
    quality = begin().quality(strategy)
    assert quality is not None
    assert quality.ratio == pytest.approx(ratio, rel=0.002)
    assert (quality.source, quality.sure) == (source, sure)


def test_what_was_trained_with_a_part_of_its_codecs_alone_is_neither_held_nor_of_known_quality():
    """It is trained first if it is faster, and no figure of it is shown until then."""
    both_codecs = parse_strategy({"gradients": INT8, "weights": INT8})
    form = {
        "strategy": both_codecs.canonical().model_dump(mode="json"),
        "strategy_hash": both_codecs.hash(),
    }
    timed = [
        make_timed("two-ranks", "fsdp2", step_ms=[50.0] * 5),
        make_timed("two-ranks", "ddp", step_ms=[40.0] * 5),
        make_timed("two-ranks", "both", step_ms=[10.0] * 5, **form),
    ]
    history = begin(timed=timed)
    assert history.incumbent_results.hash == DDP.hash()
    assert not history.quality(both_codecs.canonical()).sure
    rows = {row.split()[-1]: row.split() for row in ranking_text(history).splitlines()}
    label = both_codecs.label().split()[-1]
    assert rows[label][0] == "0.200" and "-" in rows[label]
    history = history.with_results(trained(both_codecs, 1.01))
    assert history.quality(both_codecs.canonical()).sure


def test_the_quality_of_other_numerics_is_unknown():
    history = begin()
    narrow = {"param_dtype": "bf16"}
    for other in {"weights": INT8}, {"gradients": {"codec": "int8:group=64"}}, narrow:
        assert history.quality(canonical(**other)) is None


RARE = {"engine": "ddp", "sync": {"every": 8}}


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"sync": {"every": 8, "fragments": 2}},
        {"sync": {"every": 8, "codec": "int8"}},
        {"sync": {"every": 16}},
        {"engine": "fsdp2", "sharding": "hybrid_shard", "replicas": 2},
    ],
)
def test_rare_exchanges_have_a_quality_of_their_own(other):
    """It is neither that of the start, which sends no codec either, nor that of other exchanges."""
    rare = parse_strategy(RARE)
    history = begin()
    assert history.quality(rare.canonical()) is None
    if other:
        history = history.with_results(trained(rare, 1.01, steps=30 * 8))
        assert history.quality(canonical(**RARE | other)) is None
        quality = history.quality(
            canonical(engine="manual", sharding="no_shard", sync={"every": 8})
        )
        assert (quality.ratio, quality.sure) == (pytest.approx(1.01), True)
        # half as many copies see twice as many samples each
        four = history.workload.model_copy(update={"world_size": 4})
        assert not history.model_copy(update={"workload": four}).quality(rare.canonical()).sure


def test_the_quality_after_few_synchronisations_holds_for_no_longer_run():
    rare = parse_strategy(RARE)
    compared = {
        steps: begin().with_results(trained(rare, 1.01, steps=steps)).quality(rare.canonical())
        for steps in (239, 240)
    }
    assert [quality.sure for quality in compared.values()] == [False, True]
    assert compared[239].source.endswith(", after 29 synchronisations")


def test_a_run_that_diverged_has_infinite_perplexity_and_cannot_be_the_start():
    lost = {"val_ppl": None, "val_loss": None, "diverged_at": 7}
    records = [*make_records(["fsdp2"]), make_record("ddp-int8", 0, **lost)]
    history = initial_history(records, [], AGENT, Train())
    row = history.measured[DDP_INT8.hash()]
    assert row.diverged and not row.trained
    assert row.failures[0].detail == "seed 0: diverged at step 7"
    assert history.quality(DDP_INT8.canonical()).ratio == math.inf
    with pytest.raises(UserError, match=r"agent\.start: run 'ddp-int8' failed \(seed 0: div"):
        initial_history(records, [], Agent(start="ddp-int8"), Train())


def test_a_run_that_crashed_has_failed_and_cannot_be_the_start():
    header = make_record("ddp-int8", 1).header()
    crash = Failure(**header, outcome="memory", detail="rank 0: no memory")
    records = [*make_records(["fsdp2"]), make_record("ddp-int8", 0), crash]
    history = initial_history(records, [], AGENT, Train())
    row = history.measured[DDP_INT8.hash()]
    assert not row.trained and not row.diverged
    assert row.failure(history.workload).outcome == "memory"
    assert row.failures[0].detail == "seed 1: rank 0: no memory"
    assert row.hash in history.tried
    with pytest.raises(UserError, match=r"run 'ddp-int8' failed \(seed 1: rank 0: no memory\)"):
        initial_history(records, [], Agent(start="ddp-int8"), Train())


def test_records_of_no_start_or_of_different_workloads_are_refused():
    with pytest.raises(UserError, match=r"agent\.start: no record of run 'fsdp3'.*'fsdp2'"):
        begin(agent=Agent(start="fsdp3"))
    mixed = [make_record("fsdp2", 0), make_record("ddp", 0, world_size=4)]
    with pytest.raises(UserError, match="another workload"):
        initial_history(mixed, [], AGENT, Train())


@pytest.mark.parametrize("outcome", ["timeout", "diverged"])
def test_history_keeps_what_failed_and_survives_its_file(tmp_path, outcome):
    history = begin()
    proposal = proposal_of(history, KEPT, DDP_INT8)
    ratios = {f"_{KEPT.hash()}": outcome, f"_{DDP_INT8.hash()}": 0.5}
    trial = trial_of(proposal, failed(DDP_INT8, outcome), **ratios)
    after = conclude(history, proposal, trial, AGENT)
    plain, coded = (after.measured[strategy.hash()] for strategy in (KEPT, DDP_INT8))
    for row, source, detail in (
        (plain, "round 1", "by test"),
        (
            coded,
            "run ddp-int8",
            "seed 0: in training",
        ),
    ):
        failure = row.failure(after.workload)
        assert (row.source, failure.outcome, failure.detail) == (source, outcome, detail)
    assert best_measured(after, 0.03, LIMIT, {}).hash == FSDP2.hash() == after.incumbent
    after.to_file(tmp_path / "history.json")
    assert History.from_file(tmp_path / "history.json", "make it again") == after


SLOW = Agent.model_validate({"start": "fsdp2", "link": {"rate": "100mbit"}, "world_size": 4})


def test_searches_share_training_runs_and_races_and_steps_where_link_and_ranks_are_the_same(
    tmp_path,
):
    """And where the first goes on after another, it has what its link and ranks had before."""
    first, path = begin(["fsdp2", "ddp"]), tmp_path / "history.json"
    proposal, lost, fast = proposal_of(first, KEPT, DDP_INT8, DDP), KEPT.hash(), DDP_INT8.hash()
    ratios = {f"_{lost}": "timeout", f"_{fast}": 0.5, f"_{DDP.hash()}": 0.8}
    before = conclude(first, proposal, trial_of(proposal, trained(DDP_INT8), **ratios), AGENT)
    before.to_file(path)
    assert load_history(str(path), "results.jsonl", first) == before
    assert load_history("results.jsonl", "results.jsonl", first) == first

    small = first.model_copy(update={"search": "small"})
    begun = load_history(str(path), "results.jsonl", small)
    assert begun.measured == before.measured and not begun.search_rounds
    assert with_best_incumbent(begun, 0.03, LIMIT, {}).incumbent == before.incumbent == fast
    assert with_best_incumbent(begun, 0.03, LIMIT, {fast: LIMIT + 1}).incumbent == DDP.hash()

    records = make_records(["fsdp2", "ddp"], seeds=2)
    initial = initial_history(records, [], SLOW, Train(), "slow")
    slow = load_history(str(path), "results.jsonl", initial)
    assert (slow.workload.world_size, slow.workload.trained_on) == (4, 2)
    assert slow.races == before.races and slow.rounds == before.rounds and not slow.search_rounds
    assert not slow.tried and slow.incumbent == slow.start
    assert slow.measured[fast].trained == trained(DDP_INT8)
    proposal = proposal_of(slow, DDP_INT8)
    slow = conclude(slow, proposal, trial_of(proposal, **{f"_{fast}": "memory"}), SLOW)
    slow.to_file(path)
    again = with_best_incumbent(load_history(str(path), "results.jsonl", first), 0.03, LIMIT, {})
    assert again.incumbent == fast and not again.search_rounds
    assert again.tried.keys() == before.tried.keys()
    assert again.measured[fast].failure(again.workload) is None
    assert [(decision.search, decision.link) for decision in again.rounds] == [
        ("", "loopback"),
        ("slow", "100mbit"),
    ]
