"""FSDP2: overlapped communication, and codecs between the replicas of two-dimensional meshes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardlab
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import (
    backward,
    fsdp2,
    full,
    gradients_after,
    hsdp,
    needs_torch_2_13,
    network,
)
from tests.ranks import on_ranks

W, S = 4, 2


def two_dimensions(group):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    return fully_shard(network(), mesh=mesh)


def reduced_in_another_type(group):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return fully_shard(network(), mp_policy=policy)


def computed_in_another_type(group):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(network(), mp_policy=policy)


@needs_torch_2_13
@pytest.mark.parametrize("codec", ["none", "int8:group=64"])
@pytest.mark.parametrize(
    "make", [fsdp2, two_dimensions, reduced_in_another_type, computed_in_another_type]
)
@on_ranks(2)
def test_overlapped_gradients_equal_those_of_blocking_communication(group, make, codec):
    found = []
    for overlap in (False, True):
        model = make(group)
        options = {"error_feedback": codec != "none", "minimum_size": 0, "route": "exchange"}
        shardlab.attach(model, {"codec": codec, **options}, codec, overlap=overlap)
        for step in range(3):
            # the second pass adds to the gradients of the first one
            if step != 1:
                model.zero_grad()
            backward(model, group, step)
            found += [p.grad.to_local().clone() for p in model.parameters()]
    blocking, overlapped = found[: len(found) // 2], found[len(found) // 2 :]
    assert all(map(torch.equal, blocking, overlapped))


def two_micro_batches(model, group, factor):
    """Gradients that are reduced in replicas twice and between them once."""
    if factor is not None:
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(True)
    model.zero_grad()
    for step, last in ((0, False), (1, True)):
        model.set_requires_all_reduce(last)
        backward(model, group, step)
    return torch.cat([grad.flatten() for grad in full(model, "grad").values()])


@pytest.mark.parametrize(
    ("gradients", "bound"),
    [
        ("int8:group=64", 0.02),
        ({"between_nodes": "int8", "ranks_per_node": 2}, 0.02),
        ({"codec": "bf16", "between_nodes": "int8", "ranks_per_node": 2}, 0.02),
        ("powersgd:rank=4", 0.9),
    ],
    ids=str,
)
@on_ranks(W)
def test_sums_between_replicas_are_compressed(group, gradients, bound):
    exact, model = gradients_after(hsdp(group), group, 2), hsdp(group)
    handle = shardlab.attach(model, gradients)
    lossy = gradients_after(model, group, 2)
    assert handle.ledger.summary()["gradients"]["uncompressed"] == {}
    assert is_same_everywhere(lossy, group)
    assert 0 < (lossy - exact).norm() / exact.norm() < bound
    handle.detach()
    assert torch.equal(gradients_after(model, group, 2), exact)


@pytest.mark.parametrize("factor", [None, 3.0])
@pytest.mark.parametrize("route", ["native", "exchange"])
@on_ranks(W)
def test_uncompressed_sums_equal_those_of_torch(group, route, factor):
    exact, model = two_micro_batches(hsdp(group), group, factor), hsdp(group)
    shardlab.attach(model, {"route": route})
    found = two_micro_batches(model, group, factor)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "gradients", "reduced", "gathered"),
    [
        (fsdp2, "none", "float32, summed in float32", "float32"),
        (reduced_in_another_type, "none", "bfloat16, summed in bfloat16", "bfloat16"),
        (computed_in_another_type, "none", "float32, summed in float32", "bfloat16"),
        (
            reduced_in_another_type,
            {"codec": "none", "route": "exchange"},
            "bfloat16, summed in float32",
            "bfloat16",
        ),
        (fsdp2, "bf16", "bf16, summed in float32", "float32"),
        (fsdp2, "sign", "sign", "float32"),
        (fsdp2, "int8-shared", "int8, summed in int8", "float32"),
    ],
)
@on_ranks(2)
def test_the_ledger_says_in_which_dtype_gradients_are_sent_and_summed(
    group, make, gradients, reduced, gathered
):
    model = make(group)
    if isinstance(gradients, str):
        gradients = {"codec": gradients, "minimum_size": 0 if gradients != "none" else 1024}
    handle = shardlab.attach(model, gradients)
    backward(model, group, 0)
    summary = handle.ledger.summary()
    for kind, format in (("gradients", reduced), ("weights", gathered)):
        account = summary[kind]
        assert account["formats"].keys() == {format}
        sent, other = account["bytes_wire"], account["metadata_bytes"]
        assert sent - other <= account["formats"][format] <= sent
    assert f"({reduced})" in str(handle) and f"({gathered})" in str(handle)
