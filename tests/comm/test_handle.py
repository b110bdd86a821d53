"""Metrics of an attached model, as trackers take them."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardlab
from tests.comm.wrapped_models import backward, ddp, fsdp2
from tests.ranks import on_ranks


@on_ranks(2)
def test_metrics_are_the_counts_of_the_ledger_as_numbers_by_name(group):
    model = fsdp2(group)
    compressed = {"codec": "int8", "error_feedback": True, "minimum_size": 100}
    handle = shardlab.attach(model, compressed, weights="int8")
    assert handle.metrics()["comm/bytes_sent"] == 0 and handle.metrics()["comm/ratio"] == 1
    totals = []
    for step in range(2):
        backward(model, group, step)
        metrics = handle.metrics()
        assert all(type(value) in (int, float) for value in metrics.values())
        kinds = handle.ledger.summary()
        sent = sum(kind["bytes_wire"] for kind in kinds.values())
        assert metrics["comm/bytes_sent"] == sent
        assert metrics["comm/ratio"] == sum(k["bytes_raw"] for k in kinds.values()) / sent
        for name, kind in kinds.items():
            assert metrics[f"comm/{name}_bytes_sent"] == kind["bytes_wire"]
            assert metrics[f"comm/{name}_ratio"] == kind["compression_ratio"]
        residuals = [t for n, t in handle.state_dict().items() if ">" in n and ":" not in n]
        norm = math.sqrt(sum(t.double().square().sum().item() for t in residuals))
        assert metrics["comm/residual_norm"] == pytest.approx(norm) and norm > 0
        totals.append(metrics["comm/bytes_sent"])
    assert totals[1] > totals[0]  # totals, also where nobody asks for a while
    handle.ledger.reset()
    assert handle.metrics()["comm/bytes_sent"] == 0


@on_ranks(2)
def test_one_rank_may_ask_alone(group):
    model = ddp(group)
    handle = shardlab.attach(model, "int8")
    backward(model, group, 0)
    if dist.get_rank(group) == 0:
        assert "comm/residual_norm" not in handle.metrics()
    backward(model, group, 1)  # ranks would hang, or differ in what they send


@pytest.mark.parametrize("codec", ["none", "int8", "bf16"])
@pytest.mark.parametrize("delay", [0, 1])
@on_ranks(2)
def test_a_round_shows_norm_and_cosine_of_what_replicas_have_moved(group, codec, delay):
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    sync = {"every": 2, "codec": codec, "optimizer": "sgd", "momentum": 0.0, "delay": delay}
    handle = shardlab.attach(model, sync=sync)
    first = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    second = first + torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        with torch.no_grad():
            model.module.weight += 0.001 * [first, second][dist.get_rank(group)]
        handle.step()
        if step == 0:
            metrics = handle.metrics()
            assert metrics["sync/steps_apart"] == metrics["sync/step"] == 1
            assert metrics["sync/round"] == 0 and "sync/replica_cosine" not in metrics
    for _ in range(delay):
        handle.step()
    metrics = handle.metrics()
    assert metrics["sync/round"] == 1
    norm = 0.001 * (first + second).norm().item()
    assert metrics["sync/outer_grad_norm"] == pytest.approx(norm, rel=1e-2)
    # that of a codec is of the half whose payloads a rank decodes
    cosine = nn.functional.cosine_similarity(first.flatten(), second.flatten(), 0).item()
    exactly = 1e-3 if codec == "none" else 0.03
    assert metrics["sync/replica_cosine"] == pytest.approx(cosine, abs=exactly)


@on_ranks(1)
def test_one_replica_is_never_apart_from_others(group):
    model = DistributedDataParallel(nn.Linear(64, 64))
    handle = shardlab.attach(model, sync={"every": 2})
    for _ in range(3):
        handle.step()
        metrics = handle.metrics()
        assert metrics["sync/steps_apart"] == 0 and "sync/replica_cosine" not in metrics


@on_ranks(2)
def test_fragments_are_shown_as_of_their_last_synchronisations(group):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    handle = shardlab.attach(model, sync={"every": 2, "fragments": 2})
    norms = []
    for _ in range(4):
        with torch.no_grad():
            model.module[0].weight += 1.0
            model.module[1].weight += 2.0
        handle.step()
        norms.append(handle.metrics().get("sync/outer_grad_norm"))
    # 4096 elements have moved by 2 in two steps, the others by 6 in three
    assert norms[0] is None and norms[1:] == pytest.approx([128.0, *[math.hypot(128.0, 384.0)] * 2])
