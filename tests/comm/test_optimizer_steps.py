"""Steps of a replica that count, and replicas whose numbers of steps differ."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.codecs.wire import PayloadError
from tests.comm import replicas
from tests.comm.replicas import MADE, attached, flat, meshed, refusal, stepped, trained
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import backward, batch, ddp, hsdp
from tests.ranks import on_ranks


@on_ranks(2)
def test_several_optimizers_count_one_step(group):
    model = ddp(group)
    first, *later = model.parameters()
    both = torch.optim.SGD([first], 0.01), torch.optim.AdamW(later, 0.01)
    shardlab.attach(model, sync={"every": 2}, optimizer=both)
    same = []
    for step in range(4):
        backward(model, group, step)
        for optimizer in both:
            optimizer.step()
        same.append(is_same_everywhere(flat(model), group))
    assert same == [False, True, False, True]


@pytest.mark.parametrize(
    "outer", [{}, pytest.param({"delay": 1, "fragments": 2}, marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("steps", [6, 7])
@on_ranks(2)
def test_a_replica_that_stops_early_is_told_on_all_ranks(group, outer, steps):
    """Whether or not it has something to send at the end."""
    rank, model = dist.get_rank(group), ddp(group)
    handle, optimizer = attached(model, 3, **outer)

    def run():
        stepped(model, optimizer, steps - rank, group)
        handle.synchronize()

    said = refusal(run, PayloadError)
    assert f"rank 0: step {steps}; rank 1: step {steps - 1}" in said and "drop_last=True" in said


@on_ranks(4)
def test_ranks_that_differ_have_their_numbers_in_the_world(group):
    model = hsdp(group)
    handle = shardlab.attach(model, sync={"every": 9})
    model(torch.ones(1, 40))
    rank = dist.get_rank(group)
    for _ in range(1 + rank // 2):
        handle.step()
    said = refusal(handle.synchronize, PayloadError)
    assert f"rank {rank % 2}: step 1" in said and f"rank {rank % 2 + 2}: step 2" in said


@on_ranks(2)
def test_steps_that_a_scaler_leaves_out_are_counted_by_hand(group):
    """A gradient of one replica overflows, and its optimizer does not step."""
    rank = dist.get_rank(group)

    def run(model, handle, inner, count):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            overflows = step == 1 and rank == 0
            loss = model(torch.ones(2, 40)).sum() * (torch.inf if overflows else 1.0)
            scaler.scale(loss).backward()
            scaler.step(inner)
            scaler.update()
            inner.zero_grad()
            count()
        handle.synchronize()

    model = ddp(group)
    handle, inner = attached(model, 2)
    said = refusal(lambda: run(model, handle, inner, lambda: None), PayloadError)
    assert "handle.step() in place of optimizer=" in said
    model = ddp(group)
    handle = shardlab.attach(model, sync={"every": 2})
    run(model, handle, torch.optim.SGD(model.parameters(), 0.01), handle.step)
    assert is_same_everywhere(flat(model), group)


@on_ranks(2)
def test_updates_of_single_layers_are_not_counted_as_steps(group):
    model = ddp(group)
    layers = [{"name": name, "params": [p]} for name, p in model.named_parameters()]
    optimizer = shardlab.LayerAdam(layers, threads=1)
    shardlab.attach(model, sync={"every": 1}, optimizer=optimizer)
    backward(model, group, 0)
    assert "handle.step()" in refusal(lambda: optimizer.step(layer=layers[0]["name"]))


def told(call, group):
    """Return the lines that a call warns the first rank of, and no other rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    sync = [warning for warning in caught if "sync:" in str(warning.message)]
    assert dist.get_rank(group) == 0 or not sync
    assert all(warning.filename == replicas.__file__ for warning in sync)  # the line of the script
    return [str(warning.message) for warning in sync]


def scheduled(model):
    """An optimizer whose steps a schedule of learning rates wraps, as most scripts do."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@on_ranks(2)
def test_updates_that_no_step_counts_are_told_once(group, make):
    model = make(group)
    handle = shardlab.attach(model, sync={"every": 4})
    optimizer, is_first = scheduled(model), dist.get_rank(group) == 0
    assert told(lambda: stepped(model, optimizer, 4, group), group) == []
    said = told(lambda: stepped(model, optimizer, 9, group), group)
    assert len(said) == is_first and all("handle.step() at the end of each" in x for x in said)
    handle.synchronize()
    assert is_same_everywhere(flat(model), group)


@on_ranks(2)
def test_updates_by_an_optimizer_that_took_the_place_of_another_are_told(group):
    model = ddp(group)
    _, optimizer = attached(model, 2)
    stepped(model, optimizer, 2, group)
    other = scheduled(model)
    said = told(lambda: stepped(model, other, 5, group), group)
    assert len(said) == (dist.get_rank(group) == 0)
    assert all("give attach all that step as optimizer=" in line for line in said)


@pytest.mark.parametrize("every", [1, 2, 8])
@on_ranks(2)
def test_an_iteration_may_have_several_updates(group, every):
    """As the epochs of PPO, or both updates of SAM: replicas are equal every few iterations."""
    model = ddp(group)
    handle = shardlab.attach(model, sync={"every": every})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    same = []
    for _ in range(8):
        trained(model, group, 3, optimizer)
        handle.step()
        same.append(is_same_everywhere(flat(model), group))
    assert same == [iteration % every == 0 for iteration in range(1, 9)]


@on_ranks(2)
def test_steps_that_are_counted_twice_are_refused_before_they_end_one(group):
    """Error feedback of the step that was made can still be rolled back."""
    model = ddp(group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gradients = {"codec": "int4", "error_feedback": True, "minimum_size": 0}
    sync = {"every": 2, "warmup_steps": 8}
    handle = shardlab.attach(model, gradients, sync=sync, optimizer=optimizer)
    stepped(model, optimizer, 1, group)
    before = handle.state_dict()
    backward(model, group, 1)
    assert "remove one" in refusal(handle.step)
    backward(model, group, 2)
    handle.rollback()
    after = handle.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if "residual." in name)


@on_ranks(2)
def test_a_part_may_be_updated_more_often_than_steps_are_counted(group):
    """As a critic, which takes several steps for one of the other part."""
    model = ddp(group)
    first, *later = model.parameters()
    often, rarely = torch.optim.SGD([first], 0.01), torch.optim.SGD(later, 0.01)
    handle = shardlab.attach(model, sync={"every": 2})
    same = []
    for step in range(4):
        for _ in range(5):
            backward(model, group, step)
            often.step()
        rarely.step()
        handle.step()
        same.append(is_same_everywhere(flat(model), group))
    assert same == [False, True, False, True]


@on_ranks(2)
def test_optimizers_that_do_not_all_step_in_each_iteration_are_counted_by_hand(group):
    def run(model, optimizers, count):
        for step in range(4):
            backward(model, group, step)
            for often, optimizer in zip((1, 2), optimizers, strict=True):
                if step % often == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            count()

    for counts in (True, False):
        model = ddp(group)
        first, *later = model.parameters()
        optimizers = torch.optim.SGD(later, 0.01), torch.optim.SGD([first], 0.01)
        if counts:
            handle = shardlab.attach(model, sync={"every": 4})
            run(model, optimizers, handle.step)
            assert is_same_everywhere(flat(model), group)
        else:
            shardlab.attach(model, sync={"every": 4}, optimizer=optimizers)
            said = refusal(lambda m=model, o=optimizers: run(m, o, lambda: None))
            assert "leave out optimizer=, and call handle.step()" in said


@on_ranks(2)
def test_optimizers_that_step_inside_backward_are_counted_by_hand(group):
    expected = meshed(group)
    handle, optimizer = attached(expected, 2, learning_rate=0.5)
    trained(expected, group, 3, optimizer)
    model = meshed(group)
    inside = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
    handle = shardlab.attach(model, sync={"every": 2, "learning_rate": 0.5})

    def update(parameter):
        inside[parameter].step()
        parameter.grad = None

    for parameter in inside:
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(3):
        backward(model, group, step)
        handle.step()
    assert torch.equal(flat(model), flat(expected))
    model = meshed(group)
    (last,) = [p for name, p in model.named_parameters() if name == "3.bias"]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    shardlab.attach(model, sync={"every": 2}, optimizer=optimizer)
    last.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    assert "handle.step()" in refusal(lambda: backward(model, group, 0))


class Lookahead(torch.optim.Optimizer):
    """Moves the parameters once the optimizer in it has stepped (Zhang et al. 2019)."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for parameter, slow in self.slow.items():
            parameter.copy_(slow.lerp_(parameter, 0.5))


@on_ranks(2)
def test_an_exchange_comes_after_all_that_an_optimizer_around_another_does(group):
    ends = []
    for counts in (True, False):
        model = ddp(group)
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.01))
        options = {} if counts else {"optimizer": optimizer}
        handle = shardlab.attach(model, sync={"every": 2}, **options)
        for step in range(2):
            optimizer.zero_grad()
            backward(model, group, step)
            optimizer.step()
            if counts:
                handle.step()
        assert is_same_everywhere(flat(model), group)
        ends.append(flat(model))
    assert torch.equal(*ends)


@on_ranks(2)
def test_an_optimizer_that_has_stepped_before_exchanges_begin_is_told_once(group):
    """On the first rank: a resumed run may lack the state of the handle."""
    model = ddp(group)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trained(model, group, 3, optimizer)
    shardlab.attach(model, sync={"every": 8}, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(model, group, 2, optimizer)
    said = [str(warning.message) for warning in caught if "sync:" in str(warning.message)]
    assert len(said) == (dist.get_rank(group) == 0)
    assert all("has made 3 steps" in line and "handle.load_state_dict" in line for line in said)


class Wrapped(torch.optim.Optimizer):
    """As Accelerate does it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


@on_ranks(2)
def test_optimizers_are_counted_once_and_without_their_wrappers(group):
    model = ddp(group)
    inner = torch.optim.SGD(model.parameters(), 0.01)
    shardlab.attach(model, sync={"every": 2}, optimizer=[Wrapped(inner), inner])
    found = trained(model, group, 2, inner)
    assert [is_same_everywhere(each, group) for each in found] == [False, True]


@on_ranks(2)
def test_the_end_averages_what_few_steps_have_moved_that_nothing_counted(group):
    model = ddp(group)
    handle = shardlab.attach(model, sync={"every": 32})
    handle.synchronize()  # nothing has moved
    mean = trained(model, group, 3)[-1]
    dist.all_reduce(mean)
    handle.synchronize()
    torch.testing.assert_close(flat(model), mean / 2)


class Task(nn.Module):
    """Has a method for its step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(40, 31)

    def loss(self, x):
        return self.net(x).pow(2).mean()

    forward = loss


def tasks(mesh):
    """A task whose wrapped module is called, or a method of it, or of a module around it."""
    yield (model := fully_shard(Task(), mesh=mesh)), model
    container = Task()
    fully_shard(container.net, mesh=mesh)
    yield container, container.loss
    root = fully_shard(Task(), mesh=mesh)
    register_fsdp_forward_method(root, "loss")
    yield root, root.loss
    yield (wrapped := DistributedDataParallel(Task())), wrapped.module.loss


@on_ranks(2)
def test_replicas_begin_with_the_parameters_before_the_first_update(group):
    """Weights are loaded after `attach`; outer is half way from these to the mean of replicas."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    rank = dist.get_rank(group)
    for model, loss in tasks(mesh):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        shardlab.attach(model, sync={"every": 2, "learning_rate": 0.5}, optimizer=optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        alone = Task()
        nn.init.constant_(alone.net.weight, 0.1)
        nn.init.constant_(alone.net.bias, 0.1)
        inner = torch.optim.SGD(alone.parameters(), 0.1)
        for step in range(2):
            for call, sgd in ((loss, optimizer), (alone.loss, inner)):
                sgd.zero_grad()
                call(batch(rank, step)).backward()
                sgd.step()
        mean = flat(alone)
        dist.all_reduce(mean)
        torch.testing.assert_close(flat(model), (0.1 + mean / 2) / 2)
