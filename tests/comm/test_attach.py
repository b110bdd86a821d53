"""`shardlab.attach` on models that other code wrapped."""

import os
import warnings
from types import MappingProxyType
from typing import Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

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
    hsdp,
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
    hint = ", weights uncompressed (float32): add weights='int8'"
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


@pytest.mark.parametrize(
    ("sync", "warned"),
    [({"every": 4}, 1), ({"every": 4, "warmup_steps": 2}, 0), (None, 0)],
)
@on_ranks(2)
def test_a_codec_of_gradients_that_no_rank_sends_is_named_once(group, sync, warned):
    """A replica of one rank has its whole gradient; the codec of `sync` is what it sends by."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardlab.attach(hsdp(group), "int8", sync=sync)
    said = [warning for warning in caught if "a replica is one rank" in str(warning.message)]
    assert len(said) == (warned and dist.get_rank(group) == 0)


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
