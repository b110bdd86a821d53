"""Predicted steps: what each engine sends, known answers by hand, and bounds."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.base import Block, MessageKey, Unit
from shardlab.codecs.powersgd import PowerSgd
from shardlab.config.model_and_data import Model
from shardlab.config.strategy import parse_strategy
from shardlab.core.document import validate
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.forecast.coding import codings, powersgd_phases
from shardlab.forecast.costs import Costs, Measured, Phase, Rank
from shardlab.forecast.machine import CodecLines, Line, PhasedLines
from shardlab.forecast.model import case_of, step_seconds, unpredictable
from shardlab.forecast.step import Compute, Timeline, Work
from shardlab.models.build import build_model
from shardlab.models.units import unit_sizes
from tests.forecast.timing_factory import INT8, MACHINE, MODEL, STRATEGIES, made_run
from tests.ranks import run_ranks

_CPU = torch.device("cpu")
COMPUTE = Compute(0.010, 0.020, 0.0)


class Counted(Costs):
    """Every collective takes the same time; bytes that pass are counted."""

    rank = Rank(9.0)

    def __init__(self, seconds: float, world_size: int = 2, sent: list[float] | None = None):
        self.seconds, self.world_size = seconds, world_size
        self.sent = [] if sent is None else sent

    launched_together = 2

    def transfer(self, operation, nbytes):
        passes = 2 if operation in ("all_reduce", "reduce_scatter") else 1
        self.sent.append(passes * nbytes * (self.world_size - 1) / self.world_size)
        return Phase(wait=self.seconds, collective=True)

    def move(self, operation, nbytes):
        return Phase()

    def among(self, ranks, apart=1):
        return Counted(self.seconds, ranks, self.sent)

    @property
    def inside(self):
        return self

    @property
    def across(self):
        return self.among(1)


def work_of(run: str, compute: Compute = COMPUTE, **changes: Any) -> Work:
    work = MODEL.work(*case_of(made_run("two-ranks", run)))
    return work._replace(compute=compute, launch_s=0.0, wait_s=0.0, update_s=0.0, **changes)


def test_lanes_overlap_and_share_the_link_one_after_another():
    timeline = Timeline(Rank(cores=2.0, bytes_per_second=100.0))
    assert timeline.run("a", (Phase(cpu=1.0, nbytes=300.0),)) == 3.0
    assert timeline.run("b", (Phase(nbytes=100.0, wait=0.5),)) == 4.5
    assert timeline.run("compute", (Phase(cpu=2.0),), after=1.0) == 3.0
    assert timeline.cpu_s == 3.0


def test_a_token_bucket_passes_at_once_and_refills_while_the_link_is_idle():
    timeline = Timeline(Rank(bytes_per_second=100.0, bucket_bytes=50.0))
    assert timeline.run("a", (Phase(nbytes=150.0),)) == 1.0
    assert timeline.run("a", (Phase(nbytes=50.0),)) == 1.5
    assert timeline.run("a", (Phase(nbytes=125.0),), after=1.75) == 1.75 + 1.0


RANDOMK, TOPK = "randomk:density=0.1", "topk:density=0.1"
CAPPED = "threshold:threshold=1e-30,cap=0.1"
_FREE = Line(0.0, 0.0)
_CODECS = {
    **MACHINE.codecs,
    (RANDOMK, False): CodecLines(_FREE, _FREE, Line(0.0, 0.4)),
    # values, and 3 lower bits, a one and 10 / 8 bits for each position
    (TOPK, False): CodecLines(_FREE, _FREE, Line(0.0, 0.466)),
    (CAPPED, False): CodecLines(_FREE, _FREE, Line(0.0, 0.466), variable=True),
}
_HYBRID = {"sharding": "hybrid_shard", "replicas": 2}
_LEVELS = {"codec": RANDOMK, "between_nodes": INT8, "ranks_per_node": 2}
ON_TWO: dict[str, dict[str, Any]] = {
    **{name: document for name, document in STRATEGIES.items() if "slide" not in name},
    "fsdp1-no-shard": {"engine": "fsdp1", "sharding": "no_shard"},
    "fsdp2-no-shard": {"engine": "fsdp2", "sharding": "no_shard"},
    "fsdp2-grad-op": {"engine": "fsdp2", "sharding": "shard_grad_op"},
    "ddp-summed": {"engine": "ddp", "gradients": {"codec": RANDOMK, "route": "native"}},
    "ddp-summable": {"engine": "ddp", "gradients": {"codec": RANDOMK}},
    "ddp-topk": {"engine": "ddp", "gradients": {"codec": TOPK}},
    "fsdp2-threshold": {"engine": "fsdp2", "gradients": {"codec": CAPPED}},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "fsdp2-hybrid-int8": {"engine": "fsdp2", **_HYBRID, "gradients": {"codec": INT8}},
    "manual-hybrid": {"engine": "manual", **_HYBRID},
    "fsdp2-pairs": {"engine": "fsdp2", "reshard_after_forward": 2},
    "ddp-levels": {"engine": "ddp", "gradients": _LEVELS},
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [*((name, 2) for name in ON_TWO), *((name, 4) for name in ON_FOUR)],
)
def test_predicted_traffic_matches_the_ledger_of_the_engine(name, world_size):
    """The ledger of real ranks, less the norm that clipping needs, which it does not count."""
    preset = validate(Model, {"preset": "tiny"}, "model")
    strategy = parse_strategy({**ON_TWO, **ON_FOUR}[name]).canonical()
    meta = build_model(preset, 256, 32, 0, seed=1).whole()
    units = tuple(unit.elements for unit in unit_sizes(meta, strategy, _CPU))

    def steps(group):
        model = build_model(preset, 256, 32, 0, seed=1).whole()
        engine = build_engine(model, strategy, Optimization(weight_decay=0.1, clip=1.0), group)
        for _ in range(3):
            engine.ledger.reset()
            engine.step([torch.zeros(2, 33, dtype=torch.int64)], 1e-3)
        accounts = engine.ledger.summary().values()
        sent = sum(account["bytes_wire"] for account in accounts)
        return {"sent": torch.tensor(sent, dtype=torch.float64)}

    wire = float(run_ranks(world_size, steps)[0]["sent"])
    gradients, weights = codings(strategy, MACHINE._replace(codecs=_CODECS))
    costs = Counted(0.0, world_size)
    work = Work(strategy, units, 1, COMPUTE, 0.0, 0.0, [gradients] * len(units), weights)
    step_seconds(work, costs)
    norm = 0 if strategy.engine == "ddp" else costs.sent.pop()
    assert norm <= 8
    # scales of groups and zeros at the end of vectors
    coded = strategy.gradients.codec.name != "none"
    assert sum(costs.sent) == pytest.approx(wire, rel=0.02 if coded else 1e-3)


def test_only_checkpointed_blocks_are_computed_again():
    plain = work_of("fsdp2")
    blocks = sum(plain.units[1:]) / sum(plain.units)
    first = plain.units[1] / sum(plain.units)
    last = [{"layers": "1", "activation_checkpointing": "none"}]
    for own, share in (({}, blocks), ({"overrides": last}, first)):
        full = {"engine": "fsdp2", "activation_checkpointing": "full", **own}
        again = plain._replace(strategy=parse_strategy(full).canonical())
        more = step_seconds(again, Counted(0.0)) - step_seconds(plain, Counted(0.0))
        assert more == pytest.approx(share * COMPUTE.forward)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_without_communication_takes_its_compute_time(name):
    alone = Compute(0.010, 0.020, 0.004)
    seconds = step_seconds(work_of(name, alone), Counted(0.01, world_size=1))
    assert seconds == pytest.approx(sum(alone))


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "fsdp2-exchange"])
@pytest.mark.parametrize("collective_s", [0.001, 0.05])
def test_blocking_collectives_on_a_cpu_add_up(name, collective_s):
    # 3 + 2 gathers, 3 reductions and the norm
    seconds = step_seconds(work_of(name), Counted(collective_s))
    assert seconds == pytest.approx(0.030 + 9 * collective_s)


@pytest.mark.parametrize("gather_s", [0.0005, 0.004, 0.02])
def test_fsdp2_with_prefetch_matches_its_formula(gather_s):
    """Forward: the first gather, then max(F_i, next gather). Backward: gathers and reductions in
    lanes of their own, so that at its end the slower of computation and reductions is waited for.
    """
    work = work_of("fsdp2-ahead")
    root, first, second = (n / sum(work.units) for n in work.units)
    forward = 2 * gather_s + max(gather_s, COMPUTE.forward * first)
    forward += COMPUTE.forward * (second + root)
    # the last unit is gathered again at once, the one before it while it computes
    ready_second = forward + COMPUTE.backward * root + gather_s
    end_second = ready_second + COMPUTE.backward * second
    end_first = max(end_second, ready_second + gather_s) + COMPUTE.backward * first
    reduced = max(end_second + gather_s, end_first) + gather_s
    reduced = max(reduced, end_first) + gather_s
    assert step_seconds(work, Counted(gather_s)) == pytest.approx(reduced + gather_s)


@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_grow_with_slower_links_more_ranks_and_more_bytes(name):
    work = work_of(name)
    links = [
        step_seconds(work, Measured(MACHINE, 2, 2, rate))
        for rate in (10**10, 10**9, 3 * 10**8, 10**8, 10**7)
    ]
    assert links == sorted(links) and links[0] < links[-1]
    waiting = work._replace(launch_s=1e-4, wait_s=2e-3)
    for rate in (None, 10**8):
        ranks = [step_seconds(waiting, Measured(MACHINE, n, 2, rate)) for n in (1, 2, 4, 8)]
        assert ranks == sorted(ranks)
    sizes = [
        step_seconds(
            work._replace(units=tuple(n * factor for n in work.units)),
            Measured(MACHINE, 2, 2, 10**8),
        )
        for factor in (1, 2, 5)
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("rate", [10**7, 10**9])
def test_a_step_is_at_least_its_computation_and_at_least_its_bytes(name, rate):
    work, counted = work_of(name), Counted(0.0)
    step_seconds(work, counted)
    seconds = step_seconds(work, Measured(MACHINE, 2, 2, rate))
    assert seconds >= COMPUTE.forward + COMPUTE.backward
    if not name.startswith("slide"):
        assert seconds >= 0.98 * 8 * sum(counted.sent) / rate - 0.03  # a bucket passes at once


def test_ranks_wait_before_each_collective_as_long_as_they_share_a_core():
    waits = []
    for ranks in (2, 4, 8):
        bare, waiting = (
            step_seconds(work_of("fsdp2")._replace(wait_s=s), Measured(MACHINE, ranks, 2))
            for s in (0, 2e-3)
        )
        waits.append(waiting - bare)
    assert waits == pytest.approx([9 * 2e-3, 9 * 4e-3, 9 * 8e-3])


@pytest.mark.parametrize("name", ["fsdp2", "manual", "ddp"])
def test_micro_batches_are_reduced_once(name):
    one, four = Counted(0.0), Counted(0.0)
    step_seconds(work_of(name), one)
    step_seconds(work_of(name)._replace(accumulation=4), four)
    gathered = 0 if name == "ddp" else sum(four.sent) - sum(one.sent)
    assert sum(four.sent) == pytest.approx(sum(one.sent) + gathered)
    assert (gathered > 0) == (name != "ddp")


sides = st.integers(1, 40)


@given(
    st.lists(st.tuples(sides, sides), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([2, 3, 4]),
)
def test_messages_of_powersgd_follow_from_shapes(matrices, rank, world_size):
    lines = PhasedLines(Line(1e-4, 1e-9), (), matrix=2e-5)
    predicted = powersgd_phases(
        rank, matrices, world_size, {"reduce_scatter": lines, "all_reduce": lines}
    )
    unit = Unit("u", tuple(Block(str(n), *shape) for n, shape in enumerate(matrices)))
    method = PowerSgd(rank)
    for operation, reduce in (("reduce_scatter", method.sum_scatter), ("all_reduce", method.sum)):
        wire = Recorder(world_size)
        chunks = world_size if operation == "reduce_scatter" else 1
        vector = torch.randn(chunks * sum(unit.chunk_sizes(chunks)))
        reduce(vector, unit, wire, MessageKey(0, 0, "u", 0))
        sent = [(way, size.at(1.0)) for way, size in predicted[operation].messages]
        assert sent == [message for message in wire.messages if message[1]]


class Recorder:
    """Communicator that records operations and bytes of whole vectors, and sends nothing."""

    rank = 0

    def __init__(self, world_size):
        self.world_size, self.messages = world_size, []

    def sum(self, vector):
        self.messages.append(("all_reduce", vector.nbytes))

    largest = sum

    def sum_scatter(self, vector):
        self.messages.append(("reduce_scatter", vector.nbytes))
        return vector.chunk(self.world_size)[0].clone()

    def uncompressed(self, reason):
        pass


SHARED = "int8-shared:group=128"
PHASES = {
    "reduce_scatter": PhasedLines(
        Line(3e-5, 2e-9), (("all_reduce", Line(0.0, 1 / 32)), ("reduce_scatter", Line(0.0, 1.0)))
    ),
    "all_reduce": PhasedLines(
        Line(2e-5, 1e-9), (("all_reduce", Line(0.0, 1 / 32)), ("all_reduce", Line(0.0, 1.0)))
    ),
}


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "manual", "slide"])
def test_multi_phase_methods_save_bytes_on_slow_links(engine):
    machine = MACHINE._replace(phased={(SHARED, False): PHASES})
    known = MODEL._replace(machine=machine)
    strategy = parse_strategy({"engine": engine, "gradients": {"codec": SHARED}}).canonical()
    case = case_of(made_run("x", engine, rate="10mbit"))
    assert known.predict(*case._replace(strategy=strategy)) < 0.8 * known.predict(*case)
    assert MODEL.obstacle(strategy) == "its codec was not calibrated"


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"offload": True}, "offload"),
        ({"activations": "disk", "activation_checkpointing": "full"}, "activations disk"),
        (
            {"gradients": {"codec": "powersgd:rank=2"}, "sharding": "no_shard"},
            "codec powersgd between copies of the model",
        ),
        (
            {"overrides": [{"module": "head", "reshard_after_forward": False}]},
            "overrides of embedding or head",
        ),
        ({"overrides": [{"layers": "0", "param_dtype": "bf16"}]}, "overrides of param_dtype"),
    ],
)
def test_an_unsupported_setting_is_named(settings, reported):
    strategy = parse_strategy({"engine": "fsdp2", **settings}).canonical()
    assert unpredictable(strategy, MACHINE) == f"the model does not support {reported}"
