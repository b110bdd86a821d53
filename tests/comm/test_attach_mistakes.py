"""Mistakes in a call of `shardlab.attach` are answered in one line."""

import os
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.core.errors import UserError
from tests.comm.wrapped_models import ddp, fsdp1, fsdp2, network
from tests.ranks import run_ranks


def hybrid(group):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    return FullyShardedDataParallel(
        network(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
    )


def ddp_skipping(group):
    return DistributedDataParallel(
        network(), find_unused_parameters=True, skip_all_reduce_unused_params=True
    )


def ddp_twice(group):
    model = ddp(group)
    shardlab.attach(model, "int8")
    return model


def fsdp1_twice(group):
    model = fsdp1(group)
    shardlab.attach(model, "int8")
    return model


CASES = [
    (fsdp2, {"gradients": "int9"}, "unknown codec 'int9'; did you mean 'int8'?"),
    (fsdp2, {"gradients": "int8:groop=8"}, "groop: unknown key; did you mean 'group'?"),
    (fsdp2, {"gradients": "int8", "route": "native"}, "cannot be summed"),
    (fsdp2, {"gradients": "none", "error_feedback": True}, "pointless"),
    (fsdp2, {"gradients": "int8", "residual": "int8"}, "does nothing without error_feedback"),
    (fsdp2, {"gradients": "int8", "ranks_per_node": 2}, "does nothing without between_nodes"),
    (fsdp2, {"gradients": "int8", "minimum_size": -1}, "minimum_size"),
    (fsdp2, {"weights": "topk"}, "weights need every element"),
    (fsdp2, {"exclude": "2.bia"}, "no parameter matches '2.bia'; did you mean '2.bias'?"),
    (ddp, {"weights": "int8"}, "gathers no parameters"),
    (fsdp1, {"gradients": "int8", "exclude": ["*.bias"]}, "unit 'root' is sent as one flat vector"),
    (hybrid, {"gradients": "int8"}, "no communication hook for HYBRID_SHARD"),
    (ddp_skipping, {"gradients": "int8"}, "skip_all_reduce_unused_params skips"),
    (ddp_twice, {"gradients": "int8"}, "ddp: .*register_comm_hook"),
    (fsdp1_twice, {"gradients": "int8"}, "already registered"),
    (fsdp2, {"gradients": "int8", "between_nodes": "bf16", "ranks_per_node": 3}, "not whole nodes"),
    (ddp, {"gradients": "int8", "between_nodes": "bf16"}, "no launcher says how large a node is"),
    (fsdp2, {"gradients": "powersgd", "between_nodes": "bf16"}, "has no two-level form"),
    (fsdp2, {"gradients": "int8", "between_nodes": "powersgd"}, "one level only"),
    (fsdp2, {"weights": "powersgd"}, "gradients of one level only"),
    (fsdp2, {"gradients": "powersgd", "route": "native"}, "cannot be summed"),
    (lambda group: network(), {}, "wrapped neither by fully_shard nor"),
]


def test_mistakes_are_answered_in_one_line():
    def on_rank(group):
        del os.environ["LOCAL_WORLD_SIZE"]  # as another launcher may leave it
        for make, options, expected in CASES:
            model = make(group)
            with pytest.raises(UserError) as error:
                shardlab.attach(model, **options)
            answer = str(error.value)
            assert re.search(expected, answer), f"{expected!r} is not in {answer!r}"
            assert "\n" not in answer
        return {"done": torch.tensor(True)}

    assert run_ranks(2, on_rank)[0]["done"]
