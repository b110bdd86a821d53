"""Metrics of a run from the measurements of its ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.comm.ledger import Ledger
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.train.plans import RunPlan
from shardlab.train.settings import Train
from shardlab.train.summary import RankMeasurements, merge_events, summarize

STEPS, UNTIMED = 6, 2
PLAN = RunPlan(
    "a-run",
    1,
    parse_strategy({"engine": "fsdp2"}),
    Train(steps=STEPS, untimed_steps=UNTIMED, warmup_steps=2),
    Model(preset="tiny"),
    Path("data"),
)


def event(step: int, **changes):
    return {
        "step": step,
        "loss": 1.0,
        "step_ms": 10.0,
        "gradient_norm": 1.0,
        "applied": True,
        "tokens": 64,
        "clipped_steps": 0,
        "skipped_steps": 0,
        "collective_ms": 4.0,
        "bytes_wire": 900.0,
        "interface_bytes": None,
        "interface_bytes_inside": None,
        **changes,
    }


TIMES = {
    "machine": "a",
    "cpus": [0, 1],
    "seconds": 10.0,
    "own": 9.0,
    "busy": {"0": 10.0, "1": 1.0, "2": 7.0},
    "stolen": {"0": 0.5, "1": 0.5, "2": 7.0},
}
EVENTS = [event(step) for step in range(STEPS)]


def rank(events, ledger=None, **changes) -> RankMeasurements:
    return RankMeasurements(
        **{
            "events": events,
            "ledger": (ledger or Ledger()).summary(),
            "audit": None,
            "residual_norm": None,
            "memory": {"memory_peak_bytes": 9, "memory_growth_bytes": 5}
            | {"memory_reserved_bytes": None},
            "flops_per_token": 2e6,
            "product_flops_per_s": 1e10,
            "loss_scaled": False,
            "cpu_times": TIMES,
            **changes,
        }
    )


def test_uncompressed_messages_are_means_over_ranks_and_timed_steps():
    ranks = []
    for reasons in ({"warm-up": 4, "not float32": 2}, {"warm-up": 8}):
        ledger = Ledger()
        ledger.accounts["gradients"].uncompressed.update(reasons)
        ranks.append(rank(EVENTS, ledger))
    found = summarize(PLAN, EVENTS, ranks)["ledger"]
    # four of the six steps are timed
    assert found["gradients"]["uncompressed"] == {"not float32": 0.25, "warm-up": 1.5}
    assert found["weights"]["uncompressed"] == {}


def test_bandwidth_is_bytes_over_the_time_of_collectives():
    ledger = Ledger()
    account = ledger.accounts["gradients"]
    account.bytes_raw, account.bytes_wire, account.extra_collective_s = 8e6, 2e6, 0.002
    events = [event(step, collective_ms=999.0) for step in range(UNTIMED)]
    events += [event(step) for step in range(UNTIMED, STEPS)]
    found = summarize(PLAN, events, [rank(events, ledger)])
    # 2 MB and 0.5 MB in the 4 ms of each timed step
    assert found["collective_ms"] == 4.0
    assert found["effective_bandwidth_raw"] == pytest.approx(2e6 / 4e-3)
    assert found["effective_bandwidth_wire"] == pytest.approx(5e5 / 4e-3)
    assert found["extra_collective_ms"] == pytest.approx(0.5)


def test_the_share_of_flops_is_that_of_all_ranks():
    ranks = [rank(EVENTS, product_flops_per_s=speed) for speed in (1e10, 3e10)]
    found = summarize(PLAN, EVENTS, ranks)
    assert found["product_flops_per_s"] == 2e10
    assert found["flops_share"] == pytest.approx(2e6 * 6400 / 4e10)


def test_a_step_in_which_the_machine_slept_is_in_no_time():
    slept = event(3, step_ms=12_010.0, collective_ms=12_004.0)
    found = summarize(PLAN, [*EVENTS[:3], slept, *EVENTS[4:]], [rank(EVENTS)])
    assert found.pop("paused_steps") == 1
    expected = summarize(PLAN, EVENTS, [rank(EVENTS)])
    assert expected.pop("paused_steps") == 0
    assert found == expected


@pytest.mark.parametrize("scaled, invalid", [(False, 2), (True, 1)])
def test_a_search_for_the_loss_scale_skips_steps_that_are_not_invalid(scaled, invalid):
    events = list(EVENTS)
    events[0] = event(0, applied=False, gradient_norm=float("inf"))
    events[3] = event(3, applied=False, gradient_norm=float("nan"), loss=float("nan"))
    events[-1] = event(5, skipped_steps=2)
    found = summarize(PLAN, events, [rank(events, loss_scaled=scaled)])
    assert (found["skipped_steps"], found["invalid_steps"]) == (2, invalid)


def test_a_step_has_the_mean_of_its_ranks_and_the_time_of_the_slowest():
    fast = event(0, loss=1.0, step_ms=10.0, bytes_wire=100.0, collective_ms=3.0)
    slow = event(0, loss=4.0, step_ms=14.0, bytes_wire=300.0, collective_ms=5.0)
    for ranks in ([fast], [slow]), ([slow], [fast]):
        (found,) = merge_events(ranks)
        assert (found["loss"], found["step_ms"]) == (2.5, 14.0)
        assert (found["bytes_wire"], found["collective_ms"]) == (200.0, 4.0)
    (found,) = merge_events(([fast], [{**slow, "collective_ms": None}]))
    assert found["collective_ms"] == 3.0


def test_a_step_has_the_memory_of_the_fullest_rank_and_the_residual_of_all():
    parts = {"memory_peak_bytes": 7, "residual_norm": 3.0, "val_loss": 2.5}
    more = {"memory_peak_bytes": 9, "residual_norm": 4.0, "val_loss": None}
    (merged,) = merge_events(([event(0, **parts)], [event(0, **more)]))
    assert (merged["memory_peak_bytes"], merged["residual_norm"]) == (9, 5.0)
    assert (merged["memory_reserved_bytes"], merged["val_loss"]) == (None, 2.5)
    (merged,) = merge_events(([event(0)], [event(0)]))
    assert merged["residual_norm"] is None


def test_the_training_loss_is_the_mean_of_the_last_tenth_of_the_steps():
    plan = replace(PLAN, train=PLAN.train.model_copy(update={"steps": 20}))
    events = [event(step, loss=float(step)) for step in range(20)]
    assert summarize(plan, events, [rank(events)])["train_loss"] == 18.5


def test_most_bytes_are_of_a_timed_step_and_counts_those_of_the_last():
    sent = [9e9, 9e9, 100.0, 500.0, 200.0, 300.0]
    events = [
        event(step, bytes_wire=nbytes, clipped_steps=step // 2) for step, nbytes in enumerate(sent)
    ]
    metrics = summarize(PLAN, events, [rank(events)])
    assert (metrics["bytes_peak"], metrics["clipped_steps"]) == (500.0, 2)


def test_norms_and_errors_are_of_the_whole_vector_and_memory_of_the_fullest_rank():
    audits = [
        {"exact_squared": 4.0, "error_squared": 1.0, "reduced_squared": 9.0, "product": 5.0},
        {"exact_squared": 12.0, "error_squared": 3.0, "reduced_squared": 0.0, "product": 1.0},
    ]
    memory = [
        {"memory_peak_bytes": 9, "memory_growth_bytes": 5, "memory_reserved_bytes": None},
        {"memory_peak_bytes": 7, "memory_growth_bytes": 6, "memory_reserved_bytes": None},
    ]
    ranks = [
        rank(EVENTS, audit=audit, residual_norm=norm, memory=used)
        for audit, norm, used in zip(audits, (3.0, 4.0), memory, strict=True)
    ]
    found = summarize(PLAN, EVENTS, ranks)
    assert found["residual_norm"] == 5.0
    # of 4 and 16 squared, and of a product of 6 over the roots of 16 and 9
    assert (found["grad_rel_error"], found["grad_cosine"]) == (0.5, 0.5)
    names = "memory_peak_bytes", "memory_growth_bytes", "memory_reserved_bytes"
    assert [found[name] for name in names] == [9, 6, None]


def test_rare_exchanges_count_in_bytes_of_all_steps_and_are_no_pauses():
    """A part of the steps may have more or fewer of them than the run."""
    strategy = parse_strategy({"engine": "ddp", "sync": {"every": 6}})
    ledger = Ledger()
    ledger.accounts["gradients"].bytes_raw = ledger.accounts["gradients"].bytes_wire = 600.0
    exchange = event(5, step_ms=10_000.0, bytes_wire=600.0)
    events = [*(event(step, bytes_wire=0.0) for step in range(5)), exchange]
    found = summarize(replace(PLAN, strategy=strategy), events, [rank(events, ledger)])
    assert (found["bytes_wire"], found["bytes_peak"]) == (100.0, 600.0)
    assert found["paused_steps"] == 0
    assert found["step_ms_mean"] == pytest.approx((3 * 10 + 10_000) / 4)
