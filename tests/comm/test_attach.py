"""`shardlab.attach` on models that other people's code wrapped."""

import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import optimizer

import shardlab
from tests.comm.wrapped_models import (
    WRAPPERS,
    backward,
    batch,
    fsdp2,
    full,
    gradients_after,
    network,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize("name", WRAPPERS)
def test_three_lines_compress_somebody_elses_model(name):
    wrap = WRAPPERS[name]

    def on_rank(group):
        exact = gradients_after(wrap(group), group, 2)
        model = wrap(group)
        handle = shardlab.attach(model, gradients="int8:group=64", minimum_size=100)
        lossy = gradients_after(model, group, 2)
        summary = handle.ledger.summary()["gradients"]
        handle.detach()
        restored = gradients_after(model, group, 2)
        ratio = torch.tensor(summary["compression_ratio"])
        return {"exact": exact, "lossy": lossy, "restored": restored, "ratio": ratio}

    first, second = run_ranks(2, on_rank)
    assert torch.equal(first["lossy"], second["lossy"])
    assert torch.equal(first["restored"], first["exact"])
    error = (first["lossy"] - first["exact"]).norm() / first["exact"].norm()
    assert 0 < error < 0.02
    # fsdp2 pads every unit to whole rows per rank
    assert first["ratio"] > 3


@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, 3) for name in WRAPPERS), ("fsdp2", 1), ("fsdp1", 1)]
)
def test_nothing_is_lost_where_nothing_is_compressed(name, world_size):
    def on_rank(group):
        exact = gradients_after(WRAPPERS[name](group), group, 2)
        results = {"exact": exact}
        for route in ("native", "exchange"):
            model = WRAPPERS[name](group)
            shardlab.attach(model, "none", route=route)
            results[route] = gradients_after(model, group, 2)
        return results

    for result in run_ranks(world_size, on_rank):
        torch.testing.assert_close(result["native"], result["exact"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(result["exchange"], result["exact"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "told"), [("fsdp2", True), ("fsdp2", False), ("ddp", True), ("fsdp1", True)]
)
def test_two_levels_serve_a_model(name, told):
    def on_rank(group):
        os.environ["LOCAL_WORLD_SIZE"] = "2"  # the launcher knows that all are on one machine
        exact = gradients_after(WRAPPERS[name](group), group, 2)
        model = WRAPPERS[name](group)
        handle = shardlab.attach(
            model,
            "int8:group=64",
            between_nodes="bf16",
            ranks_per_node=2 if told else None,
            error_feedback=True,
            minimum_size=100,
        )
        lossy = gradients_after(model, group, 2)
        between = handle.ledger.summary()["gradients"]["bytes_between_nodes"]
        return {"exact": exact, "lossy": lossy, "between": torch.tensor(between)}

    first, *others = run_ranks(4, on_rank)
    assert all(torch.equal(first["lossy"], other["lossy"]) for other in others)
    error = (first["lossy"] - first["exact"]).norm() / first["exact"].norm()
    assert 0 < error < 0.02 and first["between"] > 0


def test_gathered_parameters_travel_through_their_own_codec():
    def on_rank(group):
        exact = fsdp2(group)
        model = fsdp2(group)
        handle = shardlab.attach(model, weights="int8:group=64", weights_minimum_size=100)
        x = batch(dist.get_rank(group), 0)
        handle.ledger.reset()
        difference = (model(x) - exact(x)).norm() / exact(x).norm()
        model[0].unshard()
        gathered = model[0].weight.detach().clone()
        model[0].reshard()
        summary = handle.ledger.summary()["weights"]
        same = [torch.equal(full(model, "data")[k], v) for k, v in full(exact, "data").items()]
        return {
            "difference": difference,
            "gathered": gathered,
            "ratio": torch.tensor(summary["compression_ratio"]),
            "short": torch.tensor(summary["uncompressed"]["fewer than 100 elements"]),
            "same": torch.tensor(same),
        }

    first, second = run_ranks(2, on_rank)
    assert torch.equal(first["gathered"], second["gathered"])
    assert 0 < first["difference"] < 0.05
    assert first["ratio"] > 3.5 and first["short"] == 1
    # the shards themselves stay exact
    assert first["same"].all()


def test_what_a_codec_cannot_take_is_reported():
    def on_rank(group):
        model = network()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
        handle = shardlab.attach(model, "int8", "int8")
        backward(model, group, 0)
        summary = handle.ledger.summary()
        return {
            kind: torch.tensor(summary[kind]["uncompressed"]["torch.bfloat16"])
            for kind in ("gradients", "weights")
        }

    for result in run_ranks(2, on_rank):
        assert result["gradients"] == 1 and result["weights"] >= 1


def test_a_unit_in_which_a_parameter_has_no_gradient_travels_uncompressed():
    def on_rank(group):
        model = network()
        fully_shard(model)
        handle = shardlab.attach(model, "topk:density=0.1", error_feedback=True)
        model[0].weight.requires_grad_(False)
        backward(model, group, 0)
        reported = handle.ledger.summary()["gradients"]["uncompressed"]
        return {"count": torch.tensor(reported["a parameter without gradient"])}

    assert run_ranks(2, on_rank)[0]["count"] == 1


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "ddp"])
def test_a_wrapper_may_lie_inside_of_the_model(name):
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._forward_module = inner

        def forward(self, x):
            return self._forward_module(x)

    def on_rank(group):
        model = Around(WRAPPERS[name](group))
        handle = shardlab.attach(
            model, "int8", minimum_size=0, exclude=() if name == "fsdp1" else ["3.bias"]
        )
        backward(model, group, 0)
        backward(model, group, 1)
        return {"wire": torch.tensor(handle.ledger.summary()["gradients"]["bytes_wire"])}

    assert run_ranks(2, on_rank)[0]["wire"] > 0


def test_a_handle_lets_go_of_its_model():
    def on_rank(group):
        counts = []
        for _ in range(2):
            shardlab.attach(fsdp2(group), "int8", error_feedback=True)
            counts.append(len(optimizer._global_optimizer_post_hooks))
        gc.collect()
        counts.append(len(optimizer._global_optimizer_post_hooks))
        return {"counts": torch.tensor(counts)}

    assert run_ranks(1, on_rank)[0]["counts"][-1] == 0
