"""LayerAdam against torch's AdamW: updates, layers, threads, refusals."""

import copy
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import shardlab
from shardlab.codecs import native
from shardlab.codecs.adam import Hyper, adam_
from shardlab.core.errors import UserError
from tests.engines.layer_adam_cases import (
    alike,
    as_torch,
    groups,
    parameters,
    train,
    with_gradients,
)


@as_torch
@pytest.mark.parametrize(
    ("theirs", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"maximize": True, "betas": (0.8, 0.95)}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
    ],
)
def test_it_trains_as_torchs_fused_optimizer_under_a_scheduler(theirs, options):
    results = []
    own = {"decoupled_weight_decay": theirs is torch.optim.AdamW, "threads": 2}
    for kind, more in ((theirs, {"fused": True}), (shardlab.LayerAdam, own)):
        given = parameters()
        optimizer = kind(given, lr=0.1, **options, **more)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        for step in range(20):
            with_gradients(given, step)
            optimizer.step()
            scheduler.step()
        results.append(given)
    assert alike(*results)


@as_torch
def test_states_pass_between_it_and_torch_in_both_directions():
    for first, second in (
        (torch.optim.AdamW, shardlab.LayerAdam),
        (shardlab.LayerAdam, torch.optim.AdamW),
    ):
        given, expected = parameters(), parameters()
        before = first(given, 0.01, **({"fused": True} if first is torch.optim.AdamW else {}))
        train(before, given, 5)
        after = second(given, 0.5)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        assert after.param_groups[0]["lr"] == 0.01
        after.param_groups[0]["fused"] = True
        train(after, given, 5, first=5)
        assert alike(given, train(torch.optim.AdamW(expected, 0.01, fused=True), expected, 10))


def test_float32_moments_of_bf16_parameters_survive_loading():
    given = parameters(torch.bfloat16)
    optimizer = shardlab.LayerAdam(given, seed=3)
    train(optimizer, given, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["exp_avg"].dtype == torch.float32
    resumed = [nn.Parameter(each.detach().clone()) for each in given]
    other = shardlab.LayerAdam(resumed, seed=3)
    other.load_state_dict(saved)
    assert alike(train(other, resumed, 3, 3), train(optimizer, given, 3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_updated_by_several_threads_in_any_order_are_as_all_at_once(dtype):
    at_once, layered = parameters(dtype), parameters(dtype)
    train(shardlab.LayerAdam(groups(at_once), exp_avg_sq_dtype=torch.bfloat16), at_once, 3)
    optimizer = shardlab.LayerAdam(groups(layered), exp_avg_sq_dtype=torch.bfloat16, threads=2)
    for step in range(3):
        with_gradients(layered, step)
        with ThreadPoolExecutor(3) as threads:
            names = [f"layer{i}" for i in reversed(range(len(layered)))]
            list(threads.map(lambda name: optimizer.step(layer=name), names))
    assert alike(at_once, layered)


def test_step_of_one_layer_updates_no_other():
    given = with_gradients(parameters(), 0)
    before = [each.detach().clone() for each in given]
    optimizer = shardlab.LayerAdam(groups(given))
    optimizer.step(layer="layer2")
    assert [torch.equal(a, b) for a, b in zip(given, before, strict=True)] == [
        True,
        True,
        False,
        True,
    ]
    unnamed = shardlab.LayerAdam([{"params": given[:1]}, {"params": given[1:2]}])
    unnamed.step(layer=1)
    assert torch.equal(given[0], before[0]) and not torch.equal(given[1], before[1])


def test_equal_layers_are_rounded_differently():
    given = [nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2)]
    for each in given:
        each.grad = torch.ones_like(each)
    shardlab.LayerAdam(given).step()
    assert not torch.equal(*given)


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned():
    given = parameters()
    optimizer = shardlab.LayerAdam(given)

    def closure():
        optimizer.zero_grad()
        loss = sum(each.square().sum() for each in given)
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_a_parameter_without_gradient_and_gradients_in_another_order_of_memory_are_taken():
    (given,) = parameters(sizes=[(16, 32)])
    expected, zeros = given.detach().clone().view(-1), torch.zeros(512)
    gradient = torch.randn(32, 16).t()
    given.grad = gradient
    optimizer = shardlab.LayerAdam([given, nn.Parameter(torch.ones(3))], weight_decay=0.0)
    optimizer.step()
    adam_(expected, zeros, zeros.clone(), [gradient.contiguous().view(-1)], Hyper(1e-3), 1)
    assert torch.equal(given.detach().view(-1), expected)


def test_layers_are_updated_within_backward():
    results = []
    for within in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        optimizer = shardlab.LayerAdam(groups(model.parameters()), 0.01)
        for group in optimizer.param_groups if within else []:

            def update(parameter, optimizer=optimizer, name=group["name"]):
                optimizer.step(layer=name)
                parameter.grad = None

            group["params"][0].register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(torch.ones(4, 16)).square().sum().backward()
            optimizer.step()  # finds no gradients where layers have been updated
            optimizer.zero_grad()
        results.append(list(model.parameters()))
    assert alike(*results)


CPUS = sorted(os.sched_getaffinity(0))[-1:]


@pytest.mark.parametrize(
    ("options", "count"),
    [({"threads": 1}, 0), ({"threads": 2}, 2), ({"threads": 1, "cpus": CPUS}, 1)],
)
def test_one_thread_is_the_caller_unless_it_is_pinned(options, count):
    if not native.available():
        pytest.skip("no compiled kernels")

    def workers():
        gc.collect()
        tasks = Path("/proc/self/task").iterdir()
        return [(task / "comm").read_text() for task in tasks].count("shardlab-worker\n")

    before = workers()
    given = parameters(sizes=[(1 << 16,)])
    optimizer = shardlab.LayerAdam(given, **options)
    train(optimizer, given, 1)
    assert workers() == before + count


TENSOR = nn.Parameter(torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([TENSOR], {"exp_avg_sq_dtype": torch.float16}, "exp_avg_sq_dtype is float16, in which"),
        ([TENSOR], {"exp_avg_dtype": torch.float64}, "exp_avg_dtype is torch.float64: use"),
        ([TENSOR], {"amsgrad": True}, "amsgrad is not computed here"),
        ([{"params": [TENSOR], "amsgrad": True}], {}, "amsgrad is not computed here"),
        ([TENSOR], {"lr": -1.0}, "lr is -1.0"),
        ([TENSOR], {"eps": float("nan")}, "eps is nan"),
        ([TENSOR], {"betas": (0.9, 1.0)}, "each must be in"),
        ([TENSOR], {"lr": float("inf")}, "lr is inf: it must be 0 or more, and finite"),
        ([TENSOR], {"lr": None}, "lr is None: give a number"),
        ([TENSOR], {"lr": torch.ones(2)}, "give a number"),
        ([TENSOR], {"weight_decay": "a"}, "weight_decay is 'a': give a number"),
        ([TENSOR], {"betas": 0.9}, "betas are 0.9: two numbers"),
        ([TENSOR], {"betas": ("a", "b")}, "betas is 'a': give a number"),
        ([TENSOR], {"seed": 1.5}, "seed is 1.5: give an integer"),
        ([TENSOR], {"maximize": "x"}, "maximize is 'x': give True or False"),
        ([TENSOR], {"threads": "2"}, "threads is '2': give an integer"),
        ([TENSOR], {"cpus": ["0"]}, "cpus are .'0'.: give a list"),
        ([TENSOR], {"cpus": 5}, "cpus are 5: give a list"),
        ([TENSOR], {"threads": 0}, "needs at least 1 thread"),
        ([TENSOR], {"fused": True}, "fused is for torch's implementations"),
        ([TENSOR], {"bettas": (0.9, 0.95)}, "no setting 'bettas'; did you mean 'betas'"),
        ([{"params": [TENSOR], "exp_avg_dtype": torch.bfloat16}], {}, "is for all layers"),
        ([nn.Parameter(TENSOR.detach().double())], {}, "is torch.float64: use"),
        ([nn.Parameter(torch.zeros(4, 2).t())], {}, "make it .contiguous"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(given, options, message):
    with pytest.raises(UserError, match=message) as refused:
        shardlab.LayerAdam(given, **options)
    assert "\n" not in str(refused.value)


def channels_last(given):
    return given.detach().contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p, "data", p.data.double()), "is torch.float64: use"),
        (lambda p: setattr(p, "data", channels_last(p)), "make it .contiguous"),
        (lambda p: setattr(p, "grad", p.detach().to_sparse()), "sparse=False"),
    ],
)
def test_invalid_parameters_are_refused_before_any_update(change, message):
    given = with_gradients(parameters(sizes=[(4,), (2, 3, 2, 2)]), 0)
    optimizer = shardlab.LayerAdam(given)
    before = given[0].detach().clone()
    given[1].grad = None
    change(given[1])
    if given[1].grad is None:
        given[1].grad = torch.ones_like(given[1])
    with pytest.raises(UserError, match=message) as refused:
        optimizer.step()
    assert "\n" not in str(refused.value)
    assert torch.equal(given[0], before) and not optimizer.state


def test_parameters_without_memory_are_taken_and_refused_when_they_are_updated():
    given = nn.Parameter(torch.zeros(4, device="meta"))
    optimizer = shardlab.LayerAdam([given])
    given.grad = torch.zeros(4, device="meta")
    with pytest.raises(UserError, match="is on meta"):
        optimizer.step()


def test_unknown_layers_and_names_of_several_are_refused():
    optimizer = shardlab.LayerAdam(groups(parameters()))
    with pytest.raises(UserError, match="no layer 'layer9'; did you mean"):
        optimizer.step(layer="layer9")
    optimizer.add_param_group({"params": parameters()[:1], "name": "layer0"})
    with pytest.raises(UserError, match="2 layers are called 'layer0'"):
        optimizer.step(layer="layer0")
