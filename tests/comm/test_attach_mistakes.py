"""`shardlab.attach` answers a mistake in one line."""

import os
import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.core.errors import UserError
from tests.comm.wrapped_models import (
    WRAPPERS,
    backward,
    ddp,
    fsdp1,
    fsdp2,
    network,
)
from tests.ranks import on_ranks


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


def ddp_sparse(group):
    return DistributedDataParallel(nn.Sequential(nn.Embedding(9, 8, sparse=True)))


def ddp_complex(group):
    return DistributedDataParallel(nn.Linear(8, 8, dtype=torch.complex64))


def two_models(group):
    return nn.ModuleDict({"generator": ddp(group), "critic": ddp(group)})


def two_kinds(group):
    return nn.ModuleDict({"sharded": fsdp2(group), "replicated": ddp(group)})


def attached(wrap):
    def make(group):
        model = wrap(group)
        shardlab.attach(model, "int8")
        return model

    return make


def int8(**settings):
    return {"gradients": {"codec": "int8", **settings}}


MISTAKES = [
    (fsdp2, {"gradients": "int9"}, "unknown codec 'int9'; did you mean 'int4' or 'int8'?"),
    (fsdp2, {"gradients": "int8:groop=8"}, "groop: unknown key; did you mean 'group'?"),
    (fsdp2, int8(route="native"), "native is for codec 'none' alone"),
    (fsdp2, {"gradients": {"error_feedback": True}}, "pointless"),
    (fsdp2, int8(residual="int8"), "does nothing without error_feedback"),
    (fsdp2, int8(ranks_per_node=2), "does nothing without between_nodes"),
    (fsdp2, int8(minimum_size=-1), "minimum_size"),
    (fsdp2, {"weights": "topk"}, "weights need every element"),
    (
        fsdp2,
        {"gradients": {"exclude": ["2.bia"]}},
        "no parameter matches '2.bia'; did you mean '2.bias'?",
    ),
    (ddp, {"weights": "int8"}, "attach: weights does not apply to engine 'ddp': remove it"),
    (fsdp1, {"gradients": "powersgd"}, "factors matrices, and fsdp1 sends flat vectors"),
    (fsdp1, {"sync": {"every": 2}}, "sync does not apply to engine 'fsdp1': .*take ddp, fsdp2"),
    (ddp, {"overlap": True}, "overlap is for fully_shard on CPUs"),
    (fsdp2, {"overlap": "no"}, "attach: overlap: input should be a valid boolean"),
    (fsdp2, {"seed": -1}, "attach: seed: input should be greater than or equal to 0"),
    (fsdp1, int8(exclude=["*.bias"]), "unit 'root' is sent as one flat vector"),
    (hybrid, {"gradients": "int8"}, "no communication hook for HYBRID_SHARD"),
    (ddp_skipping, {"gradients": "int8"}, "skip_all_reduce_unused_params skips"),
    (attached(ddp), {"gradients": "int8"}, "ddp: .*register_comm_hook .* wrap it anew"),
    (attached(fsdp2), {"gradients": "int4"}, "attached already: call detach"),
    (ddp_sparse, {}, "'0' has sparse gradients: make it with sparse=False"),
    (ddp_complex, {"gradients": "int8"}, "weight is complex, of which DistributedDataParallel"),
    (two_models, {}, r"generator .*, critic .*: attach to each of them alone"),
    (two_kinds, {}, r"sharded \(.*\), replicated \(.*\): attach to each"),
    (attached(fsdp1), {"gradients": "int8"}, r"already registered: call detach\(\)"),
    (fsdp2, int8(between_nodes="bf16", ranks_per_node=3), "not whole nodes"),
    (ddp, int8(between_nodes="bf16"), "no launcher says how large a node is"),
    (fsdp2, int8(between_nodes="bf16", codec="powersgd"), "has no two-level form"),
    (fsdp2, int8(between_nodes="powersgd"), "has no two-level form"),
    (fsdp2, {"weights": "powersgd"}, "weights need every element"),
    (fsdp2, {"weights": shardlab.Compression()}, r"a WeightCompression \(found a Compression\)"),
    (fsdp2, {"gradients": shardlab.Strategy()}, r"a mapping or a Compression \(found a Strategy"),
    (fsdp2, {"gradients": {"exclude": "*.bias"}}, r"exclude: input should be a list \(found '"),
    (fsdp2, int8(engine="fsdp2"), "attach: gradients.engine: unknown key"),
    (ddp, {"sync_every": 32}, "unknown argument 'sync_every'; did you mean 'every' in"),
    (ddp, {"comm_hook": None}, "attach: unknown argument 'comm_hook'; did you mean 'gradients'?"),
    (ddp, {"gradient": "int8"}, "attach: unknown argument 'gradient'; did you mean 'gradients'?"),
    (
        ddp,
        {"sync": {"every": 8, "should_quantize": True}},
        "attach: sync.should_quantize: unknown key; did you mean 'codec: int8'?",
    ),
    (fsdp2, {"gradients": {"name": "int8"}}, "attach: gradients.name: unknown key"),
    (fsdp2, {"gradients": 8}, "attach: gradients.codec: a codec is its name"),
    (lambda group: network(), {}, "wrapped neither by fully_shard nor"),
]


@on_ranks(2)
def test_mistakes_are_answered_in_one_line(group):
    with patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]  # as another launcher may do
        for make, options, expected in MISTAKES:
            model = make(group)
            with pytest.raises(UserError) as error:
                shardlab.attach(model, **options)
            answer = str(error.value)
            assert re.search(expected, answer), f"{expected!r} is not in {answer!r}"
            assert "\n" not in answer


OF_RANKS = {
    "seed": lambda rank: {"codec": "randomk:density=0.5", "seed": rank},
    "seed of a sketch": lambda rank: {"codec": "sketch", "seed": rank},
    "rows": lambda rank: {"codec": f"sketch:rows={2 + 2 * rank},width={0.2 / (1 + rank)}"},
    "rank": lambda rank: {"codec": f"powersgd:rank={1 + rank}"},
    "int8-shared": lambda rank: {"codec": ["powersgd", "int8-shared"][rank]},
    "warmup_steps": lambda rank: {"codec": "int8", "warmup_steps": 1 + rank},
    "minimum_size": lambda rank: {"codec": "int8", "minimum_size": 1 + 10_000 * rank},
    "exclude": lambda rank: {"codec": "int8", "exclude": [f"{2 * rank}.bias"]},
    "error feedback": lambda rank: {"codec": "int8", "error_feedback": bool(rank)},
}


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
@on_ranks(2)
def test_other_arguments_on_another_rank_are_refused_at_the_first_message(group, name):
    for option, of_rank in OF_RANKS.items():
        model = WRAPPERS[name](group)
        options = of_rank(dist.get_rank(group))
        seed = options.pop("seed", 0)
        shardlab.attach(model, {"minimum_size": 1, **options}, seed=seed)
        with pytest.raises((ValueError, RuntimeError), match="ranks differ in what they send") as e:
            backward(model, group, 0)
        assert option.split(" of ")[0] in str(e.value)
