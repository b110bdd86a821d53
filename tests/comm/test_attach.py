"""`shardlab.attach` on models that other code wrapped, and its messages about mistakes."""

import os
import re
import warnings
from types import MappingProxyType
from typing import Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.codecs.integers import Int8
from shardlab.core.errors import UserError
from shardlab.kernels import native
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import (
    WRAPPERS,
    backward,
    ddp,
    fsdp1,
    fsdp2,
    gradients_after,
    needs_torch_2_13,
    network,
)
from tests.ranks import on_ranks


@pytest.mark.parametrize("name", WRAPPERS)
@on_ranks(2)
def test_gradients_of_wrapped_models_are_compressed_until_detach(group, name):
    wrap = WRAPPERS[name]
    exact, model = gradients_after(wrap(group), group, 2), wrap(group)
    handle = shardlab.attach(model, gradients={"codec": "int8:group=64", "minimum_size": 100})
    lossy = gradients_after(model, group, 2)
    # fsdp2 pads every unit to whole rows per rank
    assert handle.ledger.summary()["gradients"]["compression_ratio"] > 3
    assert is_same_everywhere(lossy, group)
    assert 0 < (lossy - exact).norm() / exact.norm() < 0.02
    handle.detach()
    assert torch.equal(gradients_after(model, group, 2), exact)


@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, 3) for name in WRAPPERS), ("fsdp2", 1), ("fsdp1", 1)]
)
@on_ranks()
def test_uncompressed_gradients_equal_those_of_torch(group, name, world_size):
    exact = gradients_after(WRAPPERS[name](group), group, 2)
    for route in ("native", "exchange"):
        model = WRAPPERS[name](group)
        shardlab.attach(model, {"route": route})
        found = gradients_after(model, group, 2)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "ranks_per_node"), [("fsdp2", 2), ("fsdp2", None), ("ddp", 2), ("fsdp1", 2)]
)
@on_ranks(4)
def test_two_levels_compress_a_model(group, name, ranks_per_node):
    exact, model = gradients_after(WRAPPERS[name](group), group, 2), WRAPPERS[name](group)
    # the launcher sets 4, since all are on one machine
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        gradients = {
            "codec": "int8:group=64",
            "between_nodes": "bf16",
            "ranks_per_node": ranks_per_node,
            "error_feedback": True,
            "minimum_size": 100,
        }
        handle = shardlab.attach(model, gradients)
    lossy = gradients_after(model, group, 2)
    assert is_same_everywhere(lossy, group)
    assert 0 < (lossy - exact).norm() / exact.norm() < 0.02
    assert handle.ledger.summary()["gradients"]["bytes_between_nodes"] > 0


@on_ranks(2)
def test_a_narrow_model_is_compressed_and_another_type_is_reported(group):
    for narrow, bits in ((torch.bfloat16, 16), (torch.float64, 64)):
        model = network()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(narrow, narrow))
        settings = {"codec": "int8", "minimum_size": 0}
        handle = shardlab.attach(model, gradients=settings, weights=settings)
        backward(model, group, 0)
        for account in handle.ledger.summary().values():
            reported = account["uncompressed"]
            messages = account["collectives"] - account["extra_collectives"]
            assert reported.get(str(narrow), 0) == (0 if bits == 16 else messages)
            assert (account["compression_ratio"] > 1.5) == (bits == 16)


@on_ranks(2)
def test_frozen_parameters_leave_their_residuals_to_themselves(group):
    """Two of one shape, trained in turn, the second of which has a gradient of zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    fully_shard(model)
    model[1].requires_grad_(False)
    gradients = {"codec": "topk:density=0.1", "error_feedback": True, "minimum_size": 0}
    handle = shardlab.attach(model, {**gradients, "exclude": ["1.bias"]})
    backward(model, group, 0)
    assert handle.ledger.summary()["gradients"]["uncompressed"] == {}
    assert handle.feedback.norm() > 0
    model.zero_grad()
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    (model(torch.ones(1, 40)).sum() * 0).backward()
    assert all(not grad.full_tensor().any() for p in model[1].parameters() for grad in [p.grad])
    assert handle.ledger.summary()["gradients"]["uncompressed"] == {"excluded by name": 1}


@pytest.mark.parametrize("codec", ["none", "int8:group=64"])
@on_ranks(2)
def test_replicas_of_a_group_of_one_rank_are_averaged(group, codec):
    rank = dist.get_rank(group)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    exact, model = gradients_after(ddp(group), group, 1), fsdp1(alone)
    shardlab.attach(model, {"codec": codec, "minimum_size": 100}, replicas=group)
    found = gradients_after(model, group, 1)
    assert is_same_everywhere(found, group)
    assert (found - exact).norm() / exact.norm() < (1e-6 if codec == "none" else 0.02)


@on_ranks(2)
def test_units_that_are_sharded_after_attach_are_refused(group):
    model = network()
    fully_shard(model[0])
    shardlab.attach(model, "int8")
    fully_shard(model[2])
    fully_shard(model)
    with pytest.raises(UserError, match="root, 2: sharded after attach"):
        backward(model, group, 0)


class Gated(nn.Module):
    """Uses one of its layers on some ranks alone."""

    def __init__(self, used: bool):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.used = nn.Linear(40, 40), nn.Linear(40, 40), used

    def forward(self, x):
        x = self.always(x)
        return self.sometimes(x) if self.used else x


@needs_torch_2_13
@on_ranks(2)
def test_errors_of_a_backward_pass_name_the_setting_that_helps(group):
    for codec in ("none", "int8", "powersgd"):
        options = {"route": "exchange"} if codec == "none" else {"minimum_size": 0}
        unused = fully_shard(Gated(dist.get_rank(group) == 0))
        shardlab.attach(unused, {"codec": codec, **options})
        with pytest.raises(ValueError, match=r"call set_reduce_scatter_unused_params\(True\)"):
            backward(unused, group, 0)
        filled = fully_shard(Gated(dist.get_rank(group) == 0))
        filled.set_reduce_scatter_unused_params(True)
        shardlab.attach(filled, {"codec": codec, **options})
        backward(filled, group, 0)
        divided = fsdp2(group)
        divided.set_gradient_divide_factor(3.0)
        shardlab.attach(divided, {"codec": codec, **options})
        with pytest.raises(UserError, match=r"call set_force_sum_reduction_for_comms\(True\)"):
            backward(divided, group, 0)


@on_ranks(2)
def test_wrapper_may_be_a_submodule(group):
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._forward_module = inner

        def forward(self, x):
            return self._forward_module(x)

    model = Around(fsdp2(group))
    handle = shardlab.attach(model, {"codec": "int8", "minimum_size": 0, "exclude": ["3.bias"]})
    backward(model, group, 0)
    assert handle.ledger.summary()["gradients"]["bytes_wire"] > 0


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


INT8 = {"codec": "int8", "minimum_size": 100}


@pytest.mark.parametrize(
    ("name", "gradients", "weights", "hinted"),
    [
        ("fsdp2", INT8, "none", True),
        ("fsdp1", INT8, "none", True),
        ("fsdp2", INT8, "int8", False),
        ("fsdp2", "none", "none", False),
        ("ddp", INT8, "none", False),
    ],
)
@on_ranks(2)
def test_a_handle_says_what_else_could_be_compressed(group, name, gradients, weights, hinted):
    """Not where nothing is gathered, or nothing is compressed at all."""
    model = WRAPPERS[name](group)
    handle = shardlab.attach(model, gradients, weights)
    gradients_after(model, group, 1)
    assert str(handle).startswith("sent ")
    hint = ", weights uncompressed: add weights='int8'"
    assert str(handle).endswith(hint) == hinted


@on_ranks(2)
def test_a_handle_shows_its_line(group):
    model = ddp(group)
    handle = shardlab.attach(model, "int8")
    gradients_after(model, group, 1)
    assert repr(handle) == str(handle)


@on_ranks(2)
def test_exchanges_are_compared_with_the_gradients_of_all_steps(group):
    model = ddp(group)
    inner = torch.optim.SGD(model.parameters(), 0.01)
    handle = shardlab.attach(model, sync={"every": 2}, optimizer=inner)
    assert "in place of" not in str(handle)
    for step in range(40):
        backward(model, group, step)
        inner.step()
    kilobytes = 40 * sum(p.nbytes for p in model.parameters()) / 1e3
    assert f"; in place of {kilobytes:,.1f} kB of gradients in 40 steps" in str(handle)


@on_ranks(1)
def test_one_rank_sends_nothing(group):
    model = ddp(group)
    handle = shardlab.attach(model, "int8")
    gradients_after(model, group, 1)
    assert str(handle) == "one rank: nothing is sent"


@on_ranks(1)
def test_kernels_are_there_before_the_first_message(group):
    """A source tree builds them, while other ranks would wait."""
    with patch.object(native, "library", wraps=native.library) as asked:
        shardlab.attach(ddp(group))
        assert not asked.called
        shardlab.attach(ddp(group), "int8")
        assert asked.called


@pytest.mark.parametrize(
    ("gradients", "warned"),
    [
        ("topk:density=0.01", "fewer than 100 steps cannot send"),
        ("threshold:threshold=1,cap=0.3", "fewer than 4 steps cannot send"),
        ({"codec": "topk:density=0.01", "error_feedback": True}, None),
        ({"codec": "topk:density=0.01", "warmup_steps": 1}, None),
        ("topk:density=1.0", None),
        ("int4", None),
    ],
)
@on_ranks(2)
def test_elements_that_a_short_run_never_sends_are_named_once(group, gradients, warned):
    """On the first rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardlab.attach(fsdp2(group), gradients)
    said = [str(each.message) for each in caught if "steps cannot" in str(each.message)]
    if warned is None or dist.get_rank(group):
        assert said == []
    else:
        (line,) = said
        assert line.startswith("attach: gradients: ") and warned in line and "\n" not in line


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
    (ddp, {"weights": "int8"}, "gathers no parameters"),
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
    (fsdp2, {"gradients": {"name": "int8"}}, "a codec by mapping is the value of `codec`"),
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


@on_ranks(2)
def test_overlap_that_torch_cannot_is_left_out_with_a_warning_of_the_first_rank(group):
    gradients = []
    for overlap in (False, True):
        model = fsdp2(group)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # as in torch 2.12
            patch.delattr(FSDPModule, "set_separate_reduce_scatter_group", raising=False)
            shardlab.attach(model, {"codec": "int8", "minimum_size": 0}, overlap=overlap)
        messages = [text for text in (str(w.message) for w in caught) if "2.13" in text]
        assert len(messages) == (overlap and dist.get_rank(group) == 0)
        assert all(text.endswith("without it communication blocks") for text in messages)
        backward(model, group, 0)
        gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


class Rounded(shardlab.CodecSpec):
    """A codec of a script's own."""

    factory = Int8
    name: Literal["int8"] = "int8"


@on_ranks(2)
def test_text_mapping_document_and_specification_are_one(group):
    found = []
    for gradients in (
        "int8",
        {"codec": {"name": "int8", "group": 128}},
        shardlab.Compression(codec="int8"),
        Rounded(),
        MappingProxyType({"codec": Rounded()}),
    ):
        model = ddp(group)
        handle = shardlab.attach(model, gradients)
        backward(model, group, 0)
        found.append(handle.ledger.summary()["gradients"]["bytes_wire"])
    assert found == found[:1] * 5 and found[0] > 0


@needs_torch_2_13
@on_ranks(2)
def test_overlap_on_one_rank_alone_is_refused(group):
    with pytest.raises(UserError, match=r"overlap is \[True, False\] on the ranks"):
        shardlab.attach(fsdp2(group), overlap=dist.get_rank(group) == 0)
