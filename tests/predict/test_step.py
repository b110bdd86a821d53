"""Predicted steps: what each engine sends, known answers by hand, and bounds."""

from typing import Any

import pytest
import torch

from shardlab.core.document import validate
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.models.units import unit_sizes
from shardlab.predict.coding import codings, outer_coding
from shardlab.predict.costs import FRAMING, Costs, MeasuredCosts, Phase, Rank
from shardlab.predict.machine import CodecLines, Line, PhasedLines
from shardlab.predict.model import case_of, unpredictable
from shardlab.predict.step import Compute, StepWork, section_seconds, step_seconds
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from tests.predict.timing_factory import INT8, MACHINE, MODEL, STRATEGIES, made_run
from tests.ranks import run_ranks

_CPU = torch.device("cpu")
COMPUTE = Compute(0.010, 0.020, 0.0)


class Counted(Costs):
    """Every collective takes the same time; bytes that pass are counted."""

    rank = Rank(9.0)
    ranks_per_node = 1
    launched_together = 2

    def __init__(self, seconds: float, world_size: int = 2, sent: list[float] | None = None):
        self.seconds, self.world_size = seconds, world_size
        self.sent = [] if sent is None else sent

    def transfer(self, operation, nbytes):
        passes = 2 if operation in ("all_reduce", "reduce_scatter") else 1
        self.sent.append(passes * nbytes * (self.world_size - 1) / self.world_size)
        return Phase(wait=self.seconds, collective=True)

    def move(self, operation, nbytes):
        return Phase()

    def among(self, ranks, apart=1):
        return Counted(self.seconds, ranks, self.sent)


def work_of(run: str, compute: Compute = COMPUTE, **changes: Any) -> StepWork:
    work = MODEL.work(*case_of(made_run("two-ranks", run)))
    return work._replace(compute=compute, launch_s=0.0, wait_s=0.0, update_s=0.0, **changes)


def test_lanes_overlap_and_share_the_link_and_the_cores():
    rank = Rank(cores=1.0, bytes_per_second=100.0)
    first, second = (Phase(cpu=1.0, nbytes=300.0),), (Phase(nbytes=100.0, wait=0.5),)
    assert section_seconds([first], rank) == 3.0
    assert section_seconds([first + second], rank) == 3.0 + 1.5
    assert section_seconds([first, second], rank) == 4.0  # the bytes of both
    assert section_seconds([first, (Phase(cpu=2.5),)], rank) == 3.5
    assert section_seconds([first, (Phase(cpu=2.5),)], rank._replace(cores=2.0)) == 3.0


def test_a_token_bucket_fills_while_the_link_is_idle_and_passes_at_once():
    rank = Rank(bytes_per_second=100.0, bucket_s=0.5)
    busy = Phase(nbytes=150.0)
    assert section_seconds([(busy, busy)], rank) == 3.0
    for pause, spared in ((Phase(cpu=0.25), 0.25), (Phase(wait=2.0), 0.5)):
        lane = (pause, busy)
        alone = pause.cpu + pause.wait + 1.5
        assert section_seconds([lane, ()], rank) == max(alone - spared, 1.5)


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
    "ddp-summable": {"engine": "ddp", "gradients": {"codec": RANDOMK}},
    "ddp-topk": {"engine": "ddp", "gradients": {"codec": TOPK}},
    "fsdp2-threshold": {"engine": "fsdp2", "gradients": {"codec": CAPPED}},
    "ddp-rare": {"engine": "ddp", "sync": {"every": 2, "codec": INT8}},
    "fsdp2-rare": {
        "engine": "fsdp2",
        "sharding": "no_shard",
        "sync": {"every": 4, "fragments": 2, "delay": 1},
    },
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "fsdp2-hybrid-int8": {"engine": "fsdp2", **_HYBRID, "gradients": {"codec": INT8}},
    "manual-hybrid": {"engine": "manual", **_HYBRID},
    "fsdp2-pairs": {"engine": "fsdp2", "reshard_after_forward": 2},
    "ddp-levels": {"engine": "ddp", "gradients": _LEVELS},
    "manual-hybrid-rare": {"engine": "manual", **_HYBRID, "sync": {"every": 3}},
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
    every = strategy.sync.every if strategy.sync else 1

    def steps(group):
        model = build_model(preset, 256, 32, 0, seed=1).whole()
        engine = build_engine(model, strategy, Optimization(), group)
        for _ in range(3):
            engine.wait()
            engine.ledger.reset()
            for _ in range(every):
                engine.step([torch.zeros(2, 33, dtype=torch.int64)], 1e-3)
        engine.wait()
        accounts = engine.ledger.summary().values()
        sent = sum(account["bytes_wire"] for account in accounts) / every
        return {"sent": torch.tensor(sent, dtype=torch.float64)}

    wire = float(run_ranks(world_size, steps)[0]["sent"])
    machine = MACHINE._replace(codecs=_CODECS)
    gradients, weights = codings(strategy, machine)
    outer = outer_coding(strategy, machine)
    costs = Counted(0.0, world_size)
    work = StepWork(strategy, units, 1, COMPUTE, 0.0, 0.0, gradients, weights, outer=outer)
    step_seconds(work, costs)
    # neither the norm nor what ranks compare before an exchange is in the ledger
    compared = 8.0 * (strategy.replica_count(world_size) - 1)
    first = costs.sent.index(compared) if outer else len(costs.sent)
    sent = [sum(n for n in part if n > 8) for part in (costs.sent[:first], costs.sent[first:])]
    # scales of groups and zeros at the end of vectors
    coded = strategy.gradients.codec.name != "none" or (outer and outer.codec)
    assert sent[0] + sent[1] / every == pytest.approx(wire, rel=0.02 if coded else 1e-3)


@pytest.mark.parametrize(
    ("options", "added"),
    [
        # an exchange compares steps, then sends the root and two blocks
        ({"every": 4}, (1 + 3) * 0.01 / 4),
        ({"every": 4, "fragments": 2}, (2 + 3) * 0.01 / 4),
        # two fragments, of the root with a block and of a block: a step of 30 ms hides each
        ({"every": 4, "fragments": 2, "delay": 1}, 0.0),
        ({"every": 16, "delay": 1}, (0.04 - 0.03) / 16),
        ({"every": 16, "delay": 2}, 0.0),
    ],
)
@pytest.mark.parametrize("sharding", [{"engine": "ddp"}, {"sharding": "no_shard"}])
def test_a_round_has_one_exchange_less_what_its_delay_hides(options, added, sharding):
    strategy = parse_strategy({**sharding, "sync": options}).canonical()
    rare = work_of("fsdp2", strategy=strategy, outer=outer_coding(strategy, MACHINE))
    step_s = step_seconds(rare, Counted(0.01))
    assert step_s == pytest.approx(sum(COMPUTE) + added, abs=1e-9)
    # what an exchange computes on the training thread is hidden by nothing
    busy = rare._replace(outer_update=Line(0.001, 1e-9))
    more = (3 * 0.001 + 1e-9 * sum(rare.units)) / options["every"]
    assert step_seconds(busy, Counted(0.01)) == pytest.approx(step_s + more)


def test_a_delay_hides_no_more_than_the_steps_until_the_next_fragment():
    """Each of three compares steps and sends in 50 ms each, beside one step of 30 ms."""
    options = {"every": 3, "fragments": 3, "delay": 2}
    strategy = parse_strategy({"engine": "ddp", "sync": options}).canonical()
    rare = work_of("fsdp2", strategy=strategy, outer=outer_coding(strategy, MACHINE))
    assert step_seconds(rare, Counted(0.05)) == pytest.approx(0.1)


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
    """The root and the first unit are waited for; then one more gather and forward overlap. After
    the backward pass of the root the last unit is waited for, the other and its own reduction
    overlap with the blocks; two more reductions and the norm follow."""
    work = work_of("fsdp2-ahead")
    root = work.units[0] / sum(work.units)
    forward = 2 * gather_s + max(COMPUTE.forward, gather_s)
    backward = COMPUTE.backward * root + gather_s
    backward += max(COMPUTE.backward * (1 - root), gather_s) + 2 * gather_s
    assert step_seconds(work, Counted(gather_s)) == pytest.approx(forward + backward + gather_s)


@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_grow_with_slower_links_more_ranks_and_more_bytes(name):
    work = work_of(name)
    links = [
        step_seconds(work, MeasuredCosts(MACHINE, 2, 2, rate))
        for rate in (10**10, 10**9, 3 * 10**8, 10**8, 10**7)
    ]
    assert links == sorted(links) and links[0] < links[-1]
    waiting = work._replace(launch_s=1e-4, wait_s=2e-3)
    for rate in (None, 10**8):
        ranks = [step_seconds(waiting, MeasuredCosts(MACHINE, n, 2, rate)) for n in (1, 2, 4, 8)]
        assert ranks == sorted(ranks)
    sizes = [
        step_seconds(
            work._replace(units=tuple(n * factor for n in work.units)),
            MeasuredCosts(MACHINE, 2, 2, 10**8),
        )
        for factor in (1, 2, 5)
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("rate", [10**7, 10**9])
def test_a_step_is_at_least_its_computation_and_at_least_its_bytes(name, rate):
    work, counted = work_of(name), Counted(0.0)
    step_seconds(work, counted)
    seconds = step_seconds(work, MeasuredCosts(MACHINE, 2, 2, rate))
    assert seconds >= COMPUTE.forward + COMPUTE.backward
    if not name.startswith("slide"):
        assert seconds >= 0.98 * 8 * sum(counted.sent) / rate - 0.03  # a bucket passes at once


def test_ranks_of_a_node_share_its_link_and_use_loopback_among_themselves():
    costs = MeasuredCosts(MACHINE, 4, 4, 10**8, delay_s=0.5, ranks_per_node=2)
    inside, across = costs.inside, costs.across
    assert (inside.world_size, across.world_size) == (2, 2)
    for operation in ("gather", "exchange", "all_reduce", "reduce_scatter"):
        phase = inside.transfer(operation, 100.0)
        assert (phase.nbytes, phase.wait) == (0.0, 0.0) and phase.cpu > 0
    # by both ranks of a node: 3/4 of the vector from each to the others, of whom two in three are
    # on the other node; a ring of twice as much, from one rank of the node; and half of it each
    for sends, operation, sent in (
        (costs, "exchange", 2 * 75 * 2 / 3),
        (costs, "gather", 2 * 75 * 2 / 3),
        (costs, "all_reduce", 150),
        (across, "exchange", 2 * 50),
        (across, "all_reduce", 2 * 100),
    ):
        phase = sends.transfer(operation, 100.0)
        assert phase.nbytes == pytest.approx(FRAMING * sent) and phase.wait == 0.5


def test_ranks_wait_before_each_collective_as_long_as_they_share_a_core():
    waits = []
    for ranks in (2, 4, 8):
        bare, waiting = (
            step_seconds(work_of("fsdp2")._replace(wait_s=s), MeasuredCosts(MACHINE, ranks, 2))
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


SHARED = "int8-shared:group=128"
PHASES = {
    "reduce_scatter": PhasedLines(
        Line(3e-5, 2e-9), (("all_reduce", Line(0.0, 1 / 32)), ("reduce_scatter", Line(0.0, 1.0)))
    ),
    "all_reduce": PhasedLines(
        Line(2e-5, 1e-9), (("all_reduce", Line(0.0, 1 / 32)), ("all_reduce", Line(0.0, 1.0)))
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
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
        ({"engine": "slide", "moments": "disk"}, "moments disk"),
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
