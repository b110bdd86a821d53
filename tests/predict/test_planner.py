"""Predictions without measurements: answers by hand, limits of links, laws."""

import math
from typing import Any

import pytest

from shardlab.models.memory import CUBLAS_WORKSPACE
from shardlab.models.settings import StepSize
from shardlab.models.shapes import DecoderShapes, read_decoder
from shardlab.predict.devices import (
    DEVICES,
    EFFICIENCY_ROWS,
    INSIDE,
    Efficiency,
    between_rate,
    cluster_of,
    efficiency,
    inside_rate,
)
from shardlab.predict.offers import NamedStrategy, candidates
from shardlab.predict.planner import (
    UTILISATIONS,
    PlannedJob,
    compute_s,
    fits,
    link_rates,
    memory,
    outcome,
    outcomes,
    step_s,
)
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.validation import check_fits

TOKENS = 4 * 512


def made_job(model: str = "gpt2", nodes: int = 2, per_node: int = 4, **changes: Any) -> PlannedJob:
    decoder, device = read_decoder(model), DEVICES["a100-80g"]
    assert decoder is not None
    link = cluster_of(device, per_node, INSIDE["nvlink3"][0], 10e9)
    job = PlannedJob(
        shapes=DecoderShapes(decoder, StepSize(batch_size=4, sequence_length=512)),
        parameters=decoder.parameters,
        flops=decoder.flops_per_token(512) * TOKENS,
        batch=4,
        dtype="bf16",
        device=device,
        efficiency=Efficiency(0.4, 0.6, "made up"),
        cluster=link,
        nodes=nodes,
    )
    return job._replace(**changes)


def strategy_of(document, **own):
    return parse_strategy({**document, "param_dtype": "bf16", **own}).canonical()


EVERY = [(each.name, each.document) for each in candidates(2, 4)]


def test_one_device_computes_and_updates():
    """2 N + 4 N operations per token and the attention; 28 bytes per parameter in AdamW."""
    job = made_job(nodes=1, per_node=1)
    n = 124_439_808
    flops = (6 * (n - 1024 * 768) + 12 * 12 * 768 * 512) * TOKENS
    computing = flops / (312e12 * math.sqrt(0.4 * 0.6))
    alone = strategy_of({"engine": "ddp"})
    assert step_s(job, alone) == pytest.approx(computing + 28 * n / 2039e9)
    full = strategy_of({"engine": "ddp"}, activation_checkpointing="full")
    assert step_s(job, full) == pytest.approx(4 / 3 * computing + 28 * n / 2039e9)
    assert compute_s(job, alone) == pytest.approx(step_s(job, alone))


def test_a_tenth_of_a_device_is_left_to_what_is_not_counted():
    job, strategy = made_job(), strategy_of({"engine": "ddp"})
    need = sum(memory(job, strategy)[0].values())
    for nbytes, enough in ((need / 0.9 + 1, True), (need / 0.9 - 100, False)):
        assert fits(job._replace(device=job.device._replace(memory=nbytes)), strategy) == enough


def test_error_feedback_reads_and_writes_the_residual_of_every_element():
    job, n = made_job(), 124_439_808
    plain, fed = (
        step_s(job, strategy_of({"engine": "ddp", "gradients": {"codec": "int4", **own}}))
        for own in ({}, {"error_feedback": True})
    )
    assert fed - plain == pytest.approx(8 * n * 9 / 8 / (2039e9 * math.sqrt(0.36 * 0.8)), rel=0.01)


def test_memory_by_hand():
    """16 bytes per parameter on one device; an eighth of it on eight that shard."""
    job, n = made_job(), 124_439_808
    device, host = memory(job, strategy_of({"engine": "ddp"}))
    assert [device[k] for k in ("parameters", "gradients", "moments")] == [4 * n, 4 * n, 8 * n]
    assert device["logits"] == TOKENS * 50257 * (2 + 12) and host == 0
    assert device["workspace"] == CUBLAS_WORKSPACE
    sharded, _ = memory(job, strategy_of({"engine": "fsdp2"}))
    assert sharded["parameters"] == 4 * n // 8
    streamed, of_host = memory(job, strategy_of({"engine": "slide"}))
    assert "moments" not in streamed
    assert of_host > 14 * n  # float32, its mirror in bf16, and two moments


@pytest.mark.parametrize(("name", "document"), EVERY)
def test_an_infinite_link_exposes_nothing_of_steps_without_codecs(name, document):
    job = made_job()
    free = job._replace(cluster=job.cluster.unlimited())
    strategy = strategy_of(document)
    exposed = step_s(free, strategy) - compute_s(free, strategy)
    assert exposed >= -1e-12
    if not dict(document).keys() & {"gradients", "weights", "sync"}:
        assert exposed == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("name", "document"), EVERY)
def test_the_rate_for_a_utilisation_gives_it_back(name, document):
    job, strategy = made_job(), strategy_of(document)

    def share(rate: float) -> float:
        other = job._replace(cluster=job.cluster._replace(between=between_rate(rate, 4)))
        return compute_s(other, strategy) / step_s(other, strategy)

    rates = link_rates(job, strategy)
    assert list(rates) == ["50", "75", "90"]
    for goal, rate in zip(UTILISATIONS, rates.values(), strict=True):
        if rate is None:
            assert share(1e14) < goal
        else:
            assert share(rate) == pytest.approx(goal, rel=0.01) or share(1e6) > goal


@pytest.mark.parametrize(("name", "document"), EVERY)
def test_a_faster_link_and_a_larger_share_are_never_slower(name, document):
    job, strategy = made_job(), strategy_of(document)
    slower = job._replace(cluster=job.cluster._replace(between=job.cluster.between / 10))
    assert step_s(job, strategy) <= step_s(slower, strategy)
    assert step_s(job, strategy, 0.6, 0.8) <= step_s(job, strategy, 0.4, 0.3)


def test_compression_pays_on_a_slow_link_and_rare_exchanges_more():
    job = made_job()
    slow = job._replace(cluster=job.cluster._replace(between=between_rate(1e8, 4)))
    step = {name: step_s(slow, strategy_of(document)) for name, document in EVERY}
    in_nodes = [
        "hsdp",
        "hsdp, int8",
        "hsdp, int4",
        *(f"hsdp, int4 every {every} steps" for every in (8, 32, 128)),
    ]
    assert [step[name] for name in in_nodes] == sorted(
        (step[name] for name in in_nodes), reverse=True
    )
    assert step["fsdp2, int8 both ways"] < step["fsdp2"]


def test_what_does_not_fit_is_checkpointed_and_then_split():
    job = made_job("llama-3-8b", 2, 8)
    roomy = outcome(job, NamedStrategy("fsdp2", {"engine": "fsdp2"}), TOKENS)
    assert (roomy.checkpointing, roomy.micro_batches, roomy.fits) == ("none", 1, True)
    tight = job._replace(device=job.device._replace(memory=22e9))
    planned = outcome(tight, NamedStrategy("fsdp2", {"engine": "fsdp2"}), TOKENS)
    assert planned.fits and (planned.checkpointing, planned.micro_batches) != ("none", 1)
    none = job._replace(device=job.device._replace(memory=1e9))
    assert not any(each.fits for each in outcomes(none, TOKENS))
    assert not fits(job._replace(host_bytes=1e9), strategy_of({"engine": "slide"}))


def test_a_part_of_a_node_is_a_node_of_so_many_devices():
    job = made_job()
    node, device = job.alone(4), job.alone(1)
    assert (node.world_size, device.world_size) == (4, 1)
    assert device.cluster.memory == 4 * node.cluster.memory  # that of the host, undivided
    names = {each.name for each in outcomes(device, TOKENS)}
    assert names == {"plain", "slide"}


def test_efficiency_is_the_range_of_rows_of_the_size_of_the_model():
    of_7b = [row.achieved for row in EFFICIENCY_ROWS if row.device == "h100-80g"][-3:]
    share = efficiency("h100-80g", "bf16", 8e9)
    assert (share.low, share.high) == (min(of_7b), max(of_7b))
    assert "of other devices: there is none of l4" in efficiency("l4", "bf16", 8e9).basis
    assert efficiency("h200", "bf16", 8e9).low == share.low
    assert "all of larger models" in efficiency("a100-80g", "bf16", 1e7).basis
    for row in EFFICIENCY_ROWS:
        own = efficiency(row.device, row.dtype, row.parameters)
        assert own.low <= row.achieved <= own.high


def test_every_device_names_a_known_connection_and_a_source():
    for device in DEVICES.values():
        assert inside_rate(device.inside, device) == INSIDE[device.inside][0]
        assert device.source and device.memory > 1e10 and device.bandwidth > 1e11
    assert inside_rate("nvlink", DEVICES["h200"]) == INSIDE["nvlink4"][0]
    assert inside_rate("nvlink", DEVICES["b200"]) == pytest.approx(
        1.95 * INSIDE["nvlink4"][0], 2e-2
    )


@pytest.mark.parametrize(
    ("name", "units", "per_clock", "gigahertz"),
    [
        ("a100-80g", 108, 2048, 1.41),
        ("rtx4090", 128, 512, 2.52),
        ("rtx5090", 170, 512, 2.407),
        ("rtx-pro-6000", 188, 1024, 2.617),
        ("mi300x", 304, 2048, 2.1),
        ("mi350x", 256, 4096, 2.2),
        ("mi355x", 256, 4096, 2.4),
    ],
)
def test_a_peak_is_that_of_its_units_at_their_clock(name, units, per_clock, gigahertz):
    """Operations per clock of dense matrix products in bf16 with sums in float32."""
    assert DEVICES[name].peaks["bf16"] == pytest.approx(units * per_clock * gigahertz * 1e9, 5e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 8), (4, 1), (3, 4)])
def test_strategies_for_any_nodes_are_valid_and_have_names_of_their_own(nodes, per_node, dtype):
    found = candidates(nodes, per_node, feedback=dtype != "fp16")
    assert len({each.name for each in found}) == len(found)
    for each in found:
        strategy = parse_strategy({**each.document, "param_dtype": dtype})
        check_fits(strategy, nodes * per_node)
        coded = not strategy.gradients.plain() or strategy.weights or strategy.sync
        assert each.lossy == bool(coded) == bool(strategy.canonical().attach_call())
