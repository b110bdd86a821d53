import threading
from itertools import pairwise

import pytest
import torch

from shardlab.config.strategy import parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.engines.slide_transfers import Copies
from shardlab.forecast.coding import codings
from shardlab.forecast.costs import Measured, OnCluster
from shardlab.forecast.model import fit_model, unpredictable
from shardlab.forecast.presets import PRESETS
from shardlab.forecast.schedule import simulate
from shardlab.forecast.sliding import Slide
from shardlab.forecast.step import step_seconds, step_tasks
from shardlab.forecast.work import Compute, Overhead, Work
from tests.engines.small_engine import MODES, batch_of, engine_of
from tests.forecast.cost_factory import Timed
from tests.forecast.timing_factory import INT8, MACHINE, MODEL, made_run, predicted
from tests.ranks import run_ranks

ROOT, UNIT, COUNT = 1000, 2000, 6
UNITS = (ROOT, *COUNT * [UNIT])
ALL = sum(UNITS)
NO_ROOT = (0, *COUNT * [UNIT])
"""a root that neither computes nor moves"""
LANES = {"bring": "in", "leave": "out"}


def work_of(units=UNITS, compute=Compute(0.0, 0.0, 0.0), micro=1, holding=True, **settings) -> Work:  # noqa: B008
    full = parse_strategy({"engine": "slide", **settings}).canonical()
    coded = codings(full, MACHINE)
    return Work(full, units, micro, compute, Overhead(0.0, 0.0), *coded, holding=holding)


def lane_bytes(work, costs):
    """Bytes that a step moves in each lane."""
    found = {}
    for task in step_tasks(work, costs):
        for phase in task.phases:
            if phase.operation is None:
                found[task.lane] = found.get(task.lane, 0.0) + phase.vector_bytes
    return found


def period(work, costs, *lanes, steps=4):
    """Seconds of the last of some steps in which nothing but these lanes takes time."""
    step = Slide(work, costs)
    tasks = [
        task if task.lane in ("compute", *lanes) else task._replace(phases=())
        for task in step.tasks(steps)
    ]
    spans = simulate(tasks, costs.rank)
    before, end = [spans[name].end for name in step.ends][-2:]
    return end - before


class Noting(Copies):
    """Notes which units come and leave, and how many bytes are copied in each lane."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.order = {"in": [], "out": []}
        self.nbytes = {"in": 0, "out": 0}

    def start_in(self, call, *given):
        if len(given) > 1:  # it is not the end of a pass, on which ranks agree
            self.order["in"].append(given[0].index)
        return super().start_in(call, *given)

    def start_out(self, call, *given):
        self.order["out"].append(given[0].index)
        return super().start_out(call, *given)

    def copy(self, target, source):
        self.nbytes[threading.current_thread().name.partition("_")[0]] += source.nbytes
        super().copy(target, source)


def noted(group, document, clip, micro):
    """The order of one step by lane, and the bytes that it copies."""
    copies = Noting()
    engine = engine_of(group, document, clip, copies, accumulation=micro)
    for _ in range(2):
        engine.synchronize()
        for lane in copies.order.values():
            lane.clear()
        copies.nbytes.update({"in": 0, "out": 0})
        engine.step([batch_of(0, 0)] * micro, 1e-3)
    engine.synchronize()
    sizes = tuple(unit.count for unit in engine.units)
    return {**copies.order, "bytes": [*copies.nbytes.values()], "sizes": sizes}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_simulated_copies_match_order_and_bytes_of_the_engine(mode, ranks):
    cases = [(2, None, 1), (2, 0.5, 2), (3, None, 2), (3, 0.5, 1)]

    def on_rank(group):
        found = [noted(group, {**MODES[mode], "window": w}, clip, n) for w, clip, n in cases]
        return {
            f"{case} {what}": torch.tensor(values, dtype=torch.float64)
            for case, each in enumerate(found)
            for what, values in each.items()
        }

    reported = run_ranks(ranks, on_rank)[0]
    for case, (window, clip, micro) in enumerate(cases):
        real = {what: reported[f"{case} {what}"].tolist() for what in (*LANES.values(), "bytes")}
        sizes = tuple(map(int, reported[f"{case} sizes"].tolist()))
        settings = {**MODES[mode], "window": window}
        work = work_of(sizes, micro=micro, holding=clip is not None, **settings)
        costs = Timed(0.0, ranks)
        order = {lane: [] for lane in LANES.values()}
        for task in step_tasks(work, costs):
            _, what, *unit = task.name.split()
            if what in LANES:
                order[LANES[what]].append(int(unit[0]))
        assert order == {lane: real[lane] for lane in order}
        moved = lane_bytes(work, costs)
        # zeros at the ends of units
        assert [moved["in"], moved["out"]] == pytest.approx(real["bytes"], rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_a_step_match_the_closed_form(mode, window, ranks):
    """In b (P + (N - K) G), out b P, updates 28 P + 4 P for the norm; a rank's part of each."""
    settings = MODES[mode]
    moved = lane_bytes(work_of(window=window, **settings), Timed(0.0, ranks))
    inward = 4 * (ALL + (COUNT - window) * UNIT)
    gathered, reduced = settings["param_transfer"] == "shard", settings["grad_sync"] == "gpu_reduce"
    assert moved["in"] == inward / (ranks if gathered else 1)
    assert moved["out"] == 4 * ALL / (ranks if reduced else 1)
    vectors = 1 if reduced else ranks
    assert moved["update"] == pytest.approx(ALL / ranks * (24 + 8 * vectors))


def test_bf16_halves_prefetched_bytes_and_adds_a_mirror_to_updates():
    moved = lane_bytes(work_of(param_dtype="bf16", moment_dtype="bf16"), Timed(0.0, 1))
    assert moved["in"] == 2 * (ALL + (COUNT - 2) * UNIT)
    assert moved["out"] == 2 * ALL
    assert moved["update"] == ALL * (2 + (8 + 8 + 2 + 2))


def test_micro_batches_are_accumulated_and_applied_once():
    moved = lane_bytes(work_of(micro=3), Timed(0.0, 1))
    sums = (4 + 4) + 2 * (4 + 8)
    assert moved["update"] == ALL * (sums + 4 + 28)
    assert moved["out"] == 3 * 4 * ALL


@pytest.mark.parametrize("holding", [True, False])
def test_step_without_copies_takes_its_compute_time(holding):
    compute = Compute(1.0, 2.0, 0.5)
    costs = Timed(0.1, 1)
    assert step_seconds(work_of(compute=compute, holding=holding), costs) == pytest.approx(3.5)
    again = work_of(compute=compute, activation_checkpointing="full")
    blocks = sum(again.units[1:]) / sum(again.units)
    assert step_seconds(again, costs) == pytest.approx(3.5 + blocks)
    known = work_of(compute=compute)._replace(update_s=0.4)
    assert step_seconds(known, costs) == pytest.approx(3.1)


FORWARD, BACKWARD = 0.1, 0.2
"""seconds of a unit"""
BUSY = work_of(NO_ROOT, Compute(COUNT * FORWARD, COUNT * BACKWARD, 0.0))
COPY = 4 * UNIT
"""bytes of a unit's copy"""


@pytest.mark.parametrize("holding", [True, False])
def test_dominant_offload_starts_after_the_last_unit_and_ends_the_step(holding):
    found = period(BUSY._replace(holding=holding), Timed(0.0, 1, copy=1 / COPY), "out")
    assert found == pytest.approx(COUNT * FORWARD + BACKWARD + COUNT)


def test_dominant_prefetch_copies_back_to_back_except_at_turns():
    """No unit can come while the last one computes forward and backward, nor the first backward."""
    found = period(BUSY, Timed(0.0, 1, copy=1 / COPY), "in")
    assert found == pytest.approx((2 * COUNT - 2) + FORWARD + 2 * BACKWARD)


def test_updates_overlap_backward_or_with_clipping_the_next_forward():
    """28 bytes of an element are updated, 4 measured for the norm."""
    costs = Timed(0.0, 1, update=1 / (28 * UNIT))
    beside = period(BUSY._replace(holding=False), costs, "update")
    assert beside == pytest.approx(COUNT * FORWARD + BACKWARD + COUNT * (1 + 4 / 28))
    held = period(BUSY, costs, "update")
    assert held == pytest.approx(COUNT + FORWARD + COUNT * BACKWARD + 4 / 28)


def test_forward_of_a_unit_waits_for_its_own_update_only():
    step = Slide(BUSY, Timed(0.0, 1, update=1 / (28 * UNIT)))
    tasks = step.tasks(2)
    spans = simulate(tasks, step.costs.rank)
    begin = spans[step.ends[0]].end
    later = {}
    for task in tasks:
        if spans[task.name].end > begin:
            later.setdefault(task.name.partition(" ")[2], spans[task.name])
    for unit in range(1, COUNT + 1):
        assert later[f"forward {unit}"].start == pytest.approx(later[f"update {unit}"].end)


@pytest.mark.parametrize("what", ["copy", "update"])
@pytest.mark.parametrize("holding", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_slower_memory_never_makes_a_step_shorter(what, holding, mode):
    units, compute = BUSY.units, BUSY.compute
    work = work_of(units, compute, holding=holding, **MODES[mode])
    rates = [{"copy": 2e-5, "update": 1e-6} | {what: 1e-7 * 4**power} for power in range(8)]
    steps = [step_seconds(work, Timed(0.01, 2, **rate)) for rate in rates]
    assert all(slower >= faster - 1e-9 for faster, slower in pairwise(steps))
    assert steps[-1] > 2 * steps[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_larger_window_never_makes_a_step_longer(mode):
    costs = Timed(0.01, 2, copy=1e-4, update=1e-6)
    units, compute = BUSY.units, BUSY.compute
    steps = [
        step_seconds(work_of(units, compute, window=window, **MODES[mode]), costs)
        for window in (2, 3, 4, 6, 8)
    ]
    assert all(wider <= narrow + 1e-9 for narrow, wider in pairwise(steps))
    # in the other modes as much goes out as comes in, or more, which no window changes
    assert steps[-1] < steps[0] or mode != "full-gpu_reduce"


@pytest.mark.parametrize("holding", [True, False])
@pytest.mark.parametrize("micro", [1, 3])
def test_steps_reach_a_steady_state(holding, micro):
    work = BUSY._replace(holding=holding, accumulation=micro)
    costs = Timed(0.01, 2, copy=2e-5, update=3e-6)
    lanes = ("in", "out", "update")
    assert step_seconds(work, costs) == pytest.approx(period(work, costs, *lanes, steps=12))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro", [1, 2])
def test_one_rank_communicates_nothing(mode, micro):
    tasks = step_tasks(work_of(micro=micro, **MODES[mode]), Timed(1.0, 1))
    assert all(phase.operation is None for task in tasks for phase in task.phases)


def messages(work, costs):
    """Number of times that each operation is carried out."""
    phases = [phase for task in step_tasks(work, costs) for phase in task.phases]
    found = [phase.operation for phase in phases if phase.operation]
    return {name: found.count(name) for name in set(found)}


def test_ranks_send_messages_only_over_links():
    loopback, link = Measured(MACHINE, 2, 2), Measured(MACHINE, 2, 2, 10**8)
    assert messages(work_of(), loopback) == {"all_reduce": 1}, "the norm"
    assert messages(work_of(), link) == {"all_reduce": COUNT + 1}, "every unit, on its own node"
    gathered = work_of(**MODES["shard-gpu_reduce"])
    inward = 1 + COUNT + COUNT - 2
    assert messages(gathered, loopback) == {
        "gather": inward,
        "exchange": COUNT + 1,
        "all_reduce": 1,
    }
    assert messages(gathered, link) == {"exchange": COUNT + 1, "gather": COUNT + 1}
    # by formula, no rank has a network of its own
    unframed = Measured(MACHINE, 2, 2, 10**8, framed=False)
    assert messages(work_of(), unframed) == {"all_reduce": 1}


def test_codecs_compress_messages_in_host_memory():
    coded = {"gradients": {"codec": INT8}}
    assert messages(work_of(**coded), Measured(MACHINE, 2, 2)) == {
        "exchange": COUNT + 1,
        "all_reduce": 1,
    }


def test_nodes_of_a_cluster_all_reduce_the_sums_of_their_ranks():
    one, four = (OnCluster(PRESETS["dgx-h100"], ranks) for ranks in (8, 32))
    assert messages(work_of(), one) == {"all_reduce": 1}
    assert messages(work_of(), four) == {"all_reduce": 1 + COUNT + 1}


def test_uncalibrated_memory_is_reported():
    slide = parse_strategy({"engine": "slide"}).canonical()
    reported = "the memory that it moves was not calibrated"
    assert unpredictable(slide, MACHINE._replace(memory={})) == reported
    assert unpredictable(slide, MACHINE) is None


def test_fit_recovers_the_overhead_of_slide():
    places = [("one-rank", 1, None), ("two-ranks", 2, None), ("fast", 2, "1gbit")]
    runs = [
        made_run(timing, run, ranks, rate)
        for timing, ranks, rate in places
        for run in ("ddp", "fsdp2", "slide", NO_COMMUNICATION)
    ]
    model = fit_model(MACHINE, runs)
    assert model.engines.work["slide"] == pytest.approx(MODEL.engines.work["slide"], abs=1e-5)
    other = made_run("four-ranks", "slide", 4)
    assert predicted(model, other) == pytest.approx(predicted(MODEL, other), rel=0.01)
    reduced = made_run("two-ranks", "slide-reduced")
    assert predicted(model, reduced) == pytest.approx(predicted(MODEL, reduced), rel=0.01)
