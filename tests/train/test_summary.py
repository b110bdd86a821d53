"""Metrics of a run from the measurements of its ranks."""

from pathlib import Path

import pytest

from shardlab.comm.ledger import Ledger
from shardlab.config.model_and_data import Model
from shardlab.config.schema import Train
from shardlab.config.strategy import parse_strategy
from shardlab.train.plans import RunPlan
from shardlab.train.summary import Measured, summarize

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


def rank(events, ledger=None, **changes) -> Measured:
    return Measured(
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
    found = summarize(PLAN, events, [rank(events, loss_scaled=scaled)])
    assert (found["skipped_steps"], found["invalid_steps"]) == (2, invalid)
