from typing import Any

import pytest
import torch

from shardlab.config.calibration_record import wire_bytes
from shardlab.config.model_and_data import Model
from shardlab.config.strategy import parse_strategy
from shardlab.core.document import validate
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.forecast.coding import codings
from shardlab.forecast.costs import Costs, Measured
from shardlab.forecast.machine import CodecLines, Line
from shardlab.forecast.schedule import duration, simulate
from shardlab.forecast.step import obstacle, step_tasks
from shardlab.forecast.work import Compute, Overhead, Work
from shardlab.forecast.workload import case_of
from shardlab.models.build import build_model
from shardlab.models.units import unit_sizes
from tests.forecast.cost_factory import Timed
from tests.forecast.timing_factory import INT8, MACHINE, MODEL, STRATEGIES, made_run
from tests.ranks import run_ranks

_CPU = torch.device("cpu")
NOTHING = Overhead(0.0, 0.0)
COMPUTE = Compute(0.010, 0.020, 0.0)


def work_of(run: str, compute: Compute = COMPUTE, overhead: Overhead = NOTHING, **changes) -> Work:
    made = made_run("two-ranks", run, **changes)
    return MODEL.work(*case_of(made))._replace(compute=compute, overhead=overhead, update_s=0.0)


def seconds(work: Work, costs: Costs) -> float:
    return duration(simulate(step_tasks(work, costs), costs.rank))


def moved(work: Work, world_size: int = 2) -> dict[str, list[float]]:
    """Bytes on the wire by operation."""
    found: dict[str, list[float]] = {}
    for task in step_tasks(work, Timed(0.0, world_size)):
        for phase in task.phases:
            if phase.operation is not None:
                sent = wire_bytes(phase.operation, phase.vector_bytes, world_size)
                found.setdefault(phase.operation, []).append(sent)
    return found


RANDOMK = "randomk:density=0.1"
INT4 = "int4:group=128"
TOPK = "topk:density=0.1"
CAPPED = "threshold:threshold=1e-30,cap=0.1"
_CODECS = {
    **MACHINE.codecs,
    (RANDOMK, False): CodecLines(Line(0.0, 0.0), Line(0.0, 0.0), Line(0.0, 0.4)),
    (INT4, False): CodecLines(Line(0.0, 0.0), Line(0.0, 0.0), Line(0.0, 0.5 + 2 / 128)),
    # values, and 3 lower bits, a one and 10 / 8 bits for each position
    (TOPK, False): CodecLines(Line(0.0, 0.0), Line(0.0, 0.0), Line(0.0, 0.466)),
    (CAPPED, False): CodecLines(Line(0.0, 0.0), Line(0.0, 0.0), Line(0.0, 0.466), variable=True),
    (INT8, True): MACHINE.codecs[INT8, False],
}
_LEVELS = {"codec": INT4, "between_nodes": INT8, "ranks_per_node": 2}
_HYBRID = {"sharding": "hybrid_shard", "replicas": 2}
ON_TWO: dict[str, dict[str, Any]] = {
    **{name: each for name, each in STRATEGIES.items() if name != "slide"},
    "fsdp1-no-shard": {"engine": "fsdp1", "sharding": "no_shard"},
    "fsdp2-no-shard": {"engine": "fsdp2", "sharding": "no_shard"},
    "manual-no-shard": {"engine": "manual", "sharding": "no_shard"},
    "fsdp2-grad-op": {"engine": "fsdp2", "sharding": "shard_grad_op"},
    "fsdp2-kept-layer": {
        "engine": "fsdp2",
        "overrides": [{"layers": "1", "reshard_after_forward": False}],
    },
    "fsdp2-recomputed": {"engine": "fsdp2", "activation_checkpointing": "full"},
    "fsdp2-summed": {"engine": "fsdp2", "gradients": {"codec": RANDOMK, "route": "native"}},
    "ddp-summed": {"engine": "ddp", "gradients": {"codec": RANDOMK, "route": "native"}},
    "ddp-summable": {"engine": "ddp", "gradients": {"codec": RANDOMK}},
    "ddp-int8": {"engine": "ddp", "gradients": {"codec": INT8}},
    "ddp-topk": {"engine": "ddp", "gradients": {"codec": TOPK}},
    "fsdp2-topk": {"engine": "fsdp2", "gradients": {"codec": TOPK}},
    "fsdp2-threshold": {"engine": "fsdp2", "gradients": {"codec": CAPPED}},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "fsdp1-hybrid": {"engine": "fsdp1", **_HYBRID},
    "fsdp2-hybrid": {"engine": "fsdp2", **_HYBRID},
    "fsdp2-hybrid-int8": {"engine": "fsdp2", **_HYBRID, "gradients": {"codec": INT8}},
    "manual-hybrid": {"engine": "manual", **_HYBRID},
    "fsdp2-pairs": {"engine": "fsdp2", "reshard_after_forward": 2},
    "fsdp2-levels": {"engine": "fsdp2", "gradients": _LEVELS},
    "ddp-levels": {"engine": "ddp", "gradients": _LEVELS},
    "manual-hybrid-levels": {
        "engine": "manual",
        **_HYBRID,
        "gradients": {**_LEVELS, "error_feedback": False},
    },
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [*((name, 2) for name in ON_TWO), *((name, 4) for name in ON_FOUR)],
)
def test_simulated_traffic_matches_the_ledger_of_the_engine(name, world_size):
    """The ledger of real ranks, less the norm that clipping needs, which it does not count."""
    model_of = validate(Model, {"preset": "tiny"}, "model")
    strategy = parse_strategy({**ON_TWO, **ON_FOUR}[name]).canonical()
    meta = build_model(model_of, 256, 32, 0, seed=1).whole()
    units = tuple(unit.elements for unit in unit_sizes(meta, strategy, _CPU))

    def steps(group):
        model = build_model(model_of, 256, 32, 0, seed=1).whole()
        engine = build_engine(model, strategy, Optimization(weight_decay=0.1, clip=1.0), group)
        batch = torch.zeros(2, 33, dtype=torch.int64)
        for _ in range(3):
            engine.ledger.reset()
            engine.step([batch], 1e-3)
        accounts = engine.ledger.summary().values()
        counts = [sum(a[key] for a in accounts) for key in ("bytes_wire", "collectives")]
        return {"counts": torch.tensor(counts, dtype=torch.float64)}

    wire, collectives = run_ranks(world_size, steps)[0]["counts"].tolist()
    known = codings(strategy, MACHINE._replace(codecs=_CODECS))
    work = Work(strategy, units, 1, COMPUTE, NOTHING, *known)
    tasks = step_tasks(work, Measured(MACHINE, world_size, 2))
    sent = [p.nbytes for t in tasks if "norm" not in t.name for p in t.phases if p.operation]
    # envelopes, scales of groups and zeros at the end of vectors
    coded = strategy.gradients.codec.name != "none"
    assert sum(sent) == pytest.approx(wire, rel=0.02 if coded else 1e-3)
    if name != "manual-hybrid-levels":  # whose ledger counts messages between nodes, of one node
        assert len(sent) == collectives


def test_only_checkpointed_blocks_are_computed_again():
    plain = work_of("fsdp2")
    blocks = sum(plain.units[1:]) / sum(plain.units)
    first = plain.units[1] / sum(plain.units)
    last = [{"layers": "1", "activation_checkpointing": "none"}]
    for own, share in (({}, blocks), ({"overrides": last}, first)):
        full = {"engine": "fsdp2", "activation_checkpointing": "full", **own}
        again = plain._replace(strategy=parse_strategy(full).canonical())
        more = seconds(again, Timed(0.0)) - seconds(plain, Timed(0.0))
        assert more == pytest.approx(share * COMPUTE.forward)


@pytest.mark.parametrize("name", STRATEGIES)
def test_step_without_communication_takes_its_compute_time(name):
    alone = Compute(0.010, 0.020, 0.004)
    assert seconds(work_of(name, alone), Timed(0.01, world_size=1)) == pytest.approx(sum(alone))
    if "int8" not in name:
        whole = name == "ddp" or name.startswith("slide")
        rest = 0.004 if whole else 0.002
        assert seconds(work_of(name, alone), Timed(0.0)) == pytest.approx(0.030 + rest)


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "fsdp2-exchange", "fsdp2-int8"])
@pytest.mark.parametrize("each", [0.001, 0.05])
def test_blocking_collectives_on_a_cpu_add_up(name, each):
    work = work_of(name)
    coding = sum(
        phase.cpu
        for task in step_tasks(work, Timed(each))
        if len(task.phases) > 2
        for phase in task.phases
    )
    # 3 + 2 gathers, 3 reductions and the norm
    assert seconds(work, Timed(each)) == pytest.approx(0.030 + 9 * each + coding)


@pytest.mark.parametrize("each", [0.0005, 0.004, 0.02])
def test_fsdp2_with_prefetch_matches_its_formula(each):
    """Forward: the first gather, then max(F_i, next gather). Backward: gathers and reductions in
    lanes of their own, so that at its end the slower of computation and reductions is waited for.
    """
    work = work_of("fsdp2-ahead")
    total = sum(work.units)
    root, first, second = (n / total for n in work.units)
    forward = 2 * each + max(each, COMPUTE.forward * first)
    forward += COMPUTE.forward * (second + root)
    b_root, b_first, b_second = (COMPUTE.backward * share for share in (root, first, second))
    start = forward + b_root
    # the last unit is gathered again at once, the one before it while it computes
    ready_second = start + each
    end_second = ready_second + b_second
    end_first = max(end_second, ready_second + each) + b_first
    reduced = max(end_second + each, end_first) + each
    reduced = max(reduced, end_first) + each
    assert seconds(work, Timed(each)) == pytest.approx(reduced + each)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("rate", [10**7, 10**8, 10**9])
def test_step_is_at_least_communication_and_compute_and_at_most_their_sum(name, rate):
    work, costs = work_of(name), Measured(MACHINE, 2, 2, rate)
    tasks = step_tasks(work, costs)
    sending = sum(p.nbytes for t in tasks for p in t.phases) / costs.rank.bytes_per_second
    computing = sum(p.cpu for t in tasks for p in t.phases)
    waiting = sum(p.wait for t in tasks for p in t.phases)
    found = seconds(work, costs)
    assert found >= max(sending, COMPUTE.forward + COMPUTE.backward)
    assert found <= sending + computing + waiting + 1e-9


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_slower_link_never_makes_a_step_shorter(name):
    rates = [10**7, 10**8, 3 * 10**8, 10**9, 10**10]
    steps = [seconds(work_of(name), Measured(MACHINE, 2, 2, rate)) for rate in rates]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("rate", [None, 10**8])
def test_more_ranks_on_the_same_cores_never_make_a_step_shorter(name, rate):
    waiting = work_of(name, overhead=Overhead(1e-4, 2e-3))
    steps = [seconds(waiting, Measured(MACHINE, ranks, 2, rate)) for ranks in (1, 2, 4, 8)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", STRATEGIES)
def test_more_bytes_never_make_a_step_shorter(name):
    """A model that is larger in all units alike, with the same computation."""
    costs = Measured(MACHINE, 2, 2, 10**8)
    work = work_of(name)
    steps = [
        seconds(work._replace(units=tuple(n * factor for n in work.units)), costs)
        for factor in (1, 2, 5)
    ]
    assert steps == sorted(steps) and steps[0] < steps[-1]


def test_wait_scales_with_ranks_per_core():
    """Blocking collectives: each waits once, as many times longer as ranks share a core."""
    waits = []
    for ranks in (2, 4, 8):
        costs = Measured(MACHINE, ranks, 2)
        bare, waiting = (
            seconds(work_of("fsdp2", overhead=Overhead(0, s)), costs) for s in (0, 2e-3)
        )
        waits.append(waiting - bare)
    assert waits == pytest.approx([9 * 2e-3, 9 * 4e-3, 9 * 8e-3])


@pytest.mark.parametrize(
    ("engine", "codec", "operations"),
    # of three units and the norm, and of one bucket
    [("fsdp2", "none", 9), ("fsdp2", CAPPED, 12), ("ddp", INT8, 2), ("ddp", CAPPED, 4)],
)
def test_ranks_wait_before_each_operation(engine, codec, operations):
    strategy = parse_strategy({"engine": engine, "gradients": {"codec": codec}}).canonical()
    units = (20000,) if engine == "ddp" else (10000, 5000, 5000)
    known = codings(strategy, MACHINE._replace(codecs=_CODECS))
    bare, waiting = (
        seconds(Work(strategy, units, 1, COMPUTE, Overhead(0, s), *known), Measured(MACHINE, 2, 2))
        for s in (0, 2e-3)
    )
    assert waiting - bare == pytest.approx(operations * 2e-3)


@pytest.mark.parametrize("name", ["fsdp2", "manual", "ddp"])
def test_micro_batches_are_reduced_once(name):
    one, four = (moved(work_of(name, accumulation=n)) for n in (1, 4))
    scatters = (
        "all_reduce" if name == "ddp" else "exchange" if name == "manual" else "reduce_scatter"
    )
    assert one[scatters] == four[scatters]
    if name != "ddp":
        assert sum(four["gather"]) > 2 * sum(one["gather"])


@pytest.mark.parametrize(
    "settings, reported",
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
        (
            {"overrides": [{"layers": "0", "param_dtype": "bf16"}]},
            "overrides of param_dtype",
        ),
        (
            {
                "wrap_size": 2,
                "overrides": [{"layers": "0", "activation_checkpointing": "full"}],
            },
            "overrides of layers that are not units",
        ),
        (
            {"sharding": "hybrid_shard", "replicas": 2, "reduce_every_micro_batch": True},
            "replicas with reduce_every_micro_batch",
        ),
        ({"overrides": [{"layers": "0", "reshard_after_forward": False}]}, None),
        ({}, None),
    ],
)
def test_unsupported_setting_is_named(settings, reported):
    assert obstacle(parse_strategy({"engine": "fsdp2", **settings}).canonical()) == reported
