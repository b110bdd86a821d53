"""LayerAdam against torch's AdamW: updates, layers, states, shards, refusals."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import shardlab
from shardlab.core.errors import UserError
from tests.ranks import on_ranks, run_ranks

# sizes that torch has no tail of
SIZES = [(64, 16), (64,), (16, 64), (300, 160)]
BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
as_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch rounds otherwise on this processor",
)


def parameters(dtype=torch.float32, sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def groups(given, **options):
    return [{"name": f"layer{i}", "params": [each]} | options for i, each in enumerate(given)]


def with_gradients(given, step):
    generator = torch.Generator().manual_seed(step)
    for each in given:
        each.grad = torch.randn(each.shape, generator=generator).to(each.dtype)
    return given


def train(optimizer, given, steps, first=0):
    for step in range(first, first + steps):
        with_gradients(given, step)
        optimizer.step()
    return given


def alike(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


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


@pytest.mark.parametrize("options", [{}, BF16])
def test_moments_of_bf16_parameters_and_the_seed_survive_saving(options):
    given = parameters(torch.bfloat16)
    optimizer = shardlab.LayerAdam(given, seed=3, **options)
    train(optimizer, given, 3)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    resumed = [nn.Parameter(each.detach().clone()) for each in given]
    other = shardlab.LayerAdam(resumed, **options)
    other.load_state_dict(torch.load(stream, weights_only=True))
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


@pytest.mark.parametrize("named", [True, False])
def test_step_of_one_layer_updates_no_other(named):
    given = with_gradients(parameters(), 0)
    before = [each.detach().clone() for each in given]
    optimizer = shardlab.LayerAdam(
        groups(given) if named else [{"params": [each]} for each in given]
    )
    optimizer.step(layer="layer2" if named else 2)
    same = [torch.equal(a, b) for a, b in zip(given, before, strict=True)]
    assert same == [True, True, False, True]


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


TENSOR = nn.Parameter(torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([TENSOR], {"exp_avg_sq_dtype": torch.float16}, "exp_avg_sq_dtype is torch.float16: use"),
        ([{"params": [TENSOR], "amsgrad": True}], {}, "amsgrad is not computed here"),
        ([TENSOR], {"betas": (0.9, 1.0)}, "each must be in"),
        ([TENSOR], {"lr": float("inf")}, "lr is inf: it must be 0 or more, and finite"),
        ([TENSOR], {"threads": 0}, "needs at least 1 thread"),
        ([{"params": [TENSOR], "exp_avg_dtype": torch.bfloat16}], {}, "is for all layers"),
        ([nn.Parameter(TENSOR.detach().double())], {}, "is torch.float64: use"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(given, options, message):
    with pytest.raises(UserError, match=message) as refused:
        shardlab.LayerAdam(given, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p, "data", p.data.double()), "is torch.float64: use"),
        (lambda p: setattr(p, "data", p.data.t()), "make it .contiguous"),
        (lambda p: setattr(p, "grad", p.detach().to_sparse()), "sparse=False"),
    ],
)
def test_invalid_parameters_are_refused_before_any_update(change, message):
    given = parameters(sizes=[(4,), (3, 3)])
    optimizer = shardlab.LayerAdam(given)
    before = given[0].detach().clone()
    change(given[1])
    for each in given:
        each.grad = torch.ones_like(each) if each.grad is None else each.grad
    with pytest.raises(UserError, match=message) as refused:
        optimizer.step()
    assert "\n" not in str(refused.value)
    assert torch.equal(given[0], before) and not optimizer.state


def test_unknown_layers_and_names_of_several_are_refused():
    optimizer = shardlab.LayerAdam(groups(parameters()))
    with pytest.raises(UserError, match="no layer 'layer9'; did you mean"):
        optimizer.step(layer="layer9")
    optimizer.add_param_group({"params": parameters()[:1], "name": "layer0"})
    with pytest.raises(UserError, match="2 layers are called 'layer0'"):
        optimizer.step(layer="layer0")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_trains_as_the_original_on_threads_of_its_own(copied, threads):
    given = parameters(torch.bfloat16)
    optimizer = shardlab.LayerAdam(groups(given), seed=3, threads=threads, **BF16)
    train(optimizer, given, 2)
    twins, twin = copied((given, optimizer))
    train(twin, twins, 2, 2)
    assert not alike(twins, given)
    assert alike(twins, train(optimizer, given, 2, 2))
    twin.step(layer="layer2")


def sgd(given):
    return torch.optim.SGD(given, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "sizes", "message"),
    [
        (sgd, [(4, 4)], "has momentum_buffer, but no step and no exp_avg"),
        (torch.optim.AdamW, [(4, 5)], r"shape \(4, 5\), the parameter \(4, 4\)"),
        (torch.optim.AdamW, [(4, 4), (4,)], r"groups of \[2\] parameters, the optimizer of \[1\]"),
        (lambda given: torch.optim.AdamW(given, amsgrad=True), [(4, 4)], "amsgrad"),
        (
            lambda given: torch.optim.AdamW([{"params": given, "name": "other"}]),
            [(4, 4)],
            "is the layer 'other', that of the optimizer 'layer0'",
        ),
    ],
)
def test_foreign_states_are_refused_in_one_line_and_nothing_is_loaded(make, sizes, message):
    theirs = parameters(sizes=sizes)
    other = make(theirs)
    train(other, theirs, 1)
    given = parameters(sizes=[(4, 4)])
    optimizer = shardlab.LayerAdam(groups(given))
    train(optimizer, given, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match=message) as refused:
        optimizer.load_state_dict(other.state_dict())
    assert "\n" not in str(refused.value)
    assert str(optimizer.state_dict()) == str(before)
    # nor is anything of it left behind
    optimizer.load_state_dict(before)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(dtype)


def train_model(model, optimizer, steps):
    for step in range(steps):
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        model(batch.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def same(ones, others):
    assert all(torch.equal(ones[name], others[name]) for name in others)


@as_torch
@on_ranks(2)
def test_sharded_parameters_are_updated_as_by_torchs_fused_optimizer_and_states_interchange() -> (
    None
):
    model, expected = fully_shard(network()), fully_shard(network())
    theirs = torch.optim.AdamW(expected.parameters(), 0.01, fused=True)
    train_model(expected, theirs, 3)
    train_model(model, shardlab.LayerAdam(model.parameters(), 0.01), 3)
    same(whole(model), whole(expected))
    resumed = shardlab.LayerAdam(model.parameters(), 1.0)
    saved = checkpoint.get_optimizer_state_dict(expected, theirs)
    checkpoint.set_optimizer_state_dict(model, resumed, saved)
    train_model(model, resumed, 3)
    train_model(expected, theirs, 3)
    same(whole(model), whole(expected))
    again = checkpoint.get_optimizer_state_dict(model, resumed)
    checkpoint.set_optimizer_state_dict(expected, theirs, again)


def test_stochastic_rounding_of_shards_matches_the_whole_tensor():
    expected = network(torch.bfloat16)
    with_gradients([*expected.parameters()], 0)
    shardlab.LayerAdam(expected.parameters(), exp_avg_sq_dtype=torch.bfloat16).step()

    def on_rank(group):
        model = network(torch.bfloat16)
        optimizer = shardlab.LayerAdam(model.parameters(), exp_avg_sq_dtype=torch.bfloat16)
        wholes = with_gradients([*model.parameters()], 0)
        gradients = [each.grad.chunk(2)[group.rank()] for each in wholes]
        fully_shard(model)
        # what Accelerate does when it prepares a model and its optimizer
        optimizer.param_groups[0]["params"] = shards = list(model.parameters())
        for each, gradient in zip(shards, gradients, strict=True):
            each.grad = torch.zeros_like(each)
            each.grad.to_local().copy_(gradient)
        optimizer.step()
        return whole(model)

    for found in run_ranks(2, on_rank):
        same(found, expected.state_dict())


@on_ranks(2)
def test_column_shards_train_in_float32_and_refuse_stochastic_rounding() -> None:
    def by_columns(model):
        return fully_shard(model, shard_placement_fn=lambda each: Shard(each.dim() - 1))

    model, expected = by_columns(network()), by_columns(network())
    train_model(expected, torch.optim.AdamW(expected.parameters(), 0.01, fused=True), 1)
    train_model(model, shardlab.LayerAdam(model.parameters(), 0.01), 1)
    for name, value in whole(expected).items():
        torch.testing.assert_close(whole(model)[name], value, rtol=1e-6, atol=1e-8)
    narrow = by_columns(network(torch.bfloat16))
    with pytest.raises(UserError, match=r"\(64, 32\) is cut across its rows"):
        train_model(narrow, shardlab.LayerAdam(narrow.parameters(), 0.01), 1)


@pytest.mark.gpu
@on_ranks(1)
def test_gradients_that_a_gpu_still_copies_are_awaited(group):
    gradient = torch.ones(4096, 4096, device="cuda")
    for _ in range(50):  # ones again, later
        gradient = (gradient @ gradient) / 4096
    weight = nn.Parameter(torch.zeros(4096, 4096))
    weight.grad = gradient.to("cpu", non_blocking=True)
    shardlab.LayerAdam([weight], lr=1.0).step()
    torch.testing.assert_close(weight.detach(), torch.full((4096, 4096), -1.0))
