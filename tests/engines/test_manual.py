"""Flat units, gathers, frees and reductions of the manual engine."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardlab.comm.attach import attach
from shardlab.engines.flat import make_mesh, named_parts
from shardlab.engines.manual import FlatSharded
from shardlab.engines.manual_schedule import FlatUnit
from shardlab.models.units import UnitPlan
from tests.ranks import on_ranks


class Stack(nn.Module):
    """Layers one after another, one more that is never used, and an embedding tied to the head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.idle = nn.Linear(8, 8)
        self.without_backward: int | None = None
        """block at whose output backward ends"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for index, block in enumerate(self.blocks):
            hidden = torch.tanh(block(hidden))
            if index == self.without_backward:
                hidden = hidden.detach()
        return self.head(hidden)


def sharded(group, layers=4, reshard=True, ends=(), **options):
    """`ends`: which modules around the blocks are units of their own."""
    torch.manual_seed(0)
    model = Stack(layers)
    plans = [UnitPlan((block,), reshard, torch.float32) for block in model.blocks]
    if ends:
        modules = tuple(getattr(model, name) for name in ends)
        plans.insert(0, UnitPlan(modules, False, torch.float32))
    mesh = make_mesh(group, 1, torch.device("cpu"))
    wrapped = FlatSharded(model, lambda module: None, plans, mesh, **options)
    return model, wrapped, attach(wrapped, {"route": "exchange"})


def loss_of(wrapped, rank):
    tokens = torch.arange(10).roll(rank)[None]
    return nn.functional.cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("ends", [(), ("embedding", "head")])
@on_ranks(2)
def test_gradients_of_shards_are_the_mean_over_ranks(group, ends) -> None:
    torch.manual_seed(0)
    plain = Stack(4)
    for rank in range(2):
        (loss_of(plain, rank) / 2).backward()
    _, wrapped, _ = sharded(group, ends=ends)
    loss_of(wrapped, dist.get_rank(group)).backward()
    wrapped.schedule.after_backward()
    for unit in wrapped.units:
        whole = [torch.empty_like(unit.shard.grad) for _ in range(2)]
        dist.all_gather(whole, unit.shard.grad, group=group)
        for name, part in named_parts(torch.cat(whole), unit.shapes).items():
            expected = plain.get_parameter(name).grad
            expected = torch.zeros_like(part) if expected is None else expected
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-6)


@on_ranks(2)
def test_only_units_in_use_and_the_next_have_memory(group) -> None:
    model, wrapped, _ = sharded(group, layers=5)
    counts = []

    def count(*_):
        counts.append(sum(unit.allocated for unit in wrapped.units))

    for block in model.blocks:
        block.register_forward_hook(count)
        block.register_full_backward_hook(count)
    loss_of(wrapped, 0).backward()
    wrapped.schedule.after_backward()
    # the root, the unit in use, the one ahead, and in backward the one whose gradients come last
    assert max(counts) <= 4
    assert not any(unit.allocated for unit in wrapped.units)


@on_ranks(2)
def test_gathers_and_reductions_are_as_many_as_theory_says(group) -> None:
    counts = []
    for reshard in (True, False):
        _, wrapped, handle = sharded(group, layers=5, reshard=reshard)
        loss_of(wrapped, 0).backward()
        wrapped.schedule.after_backward()
        for account in handle.ledger.accounts.values():
            # the ranks once compare what they are about to send
            counts.append(account.collectives - account.extra_collectives)
    # forward gathers the root and every block, backward all blocks but the last again
    assert counts == [6, 1 + 5 + 4, 6, 1 + 5]


@on_ranks(2)
def test_a_tied_embedding_of_its_own_is_gathered_once_and_moves_nothing_else(group) -> None:
    _, wrapped, handle = sharded(group, layers=5, ends=("embedding", "head"))
    loss_of(wrapped, 0).backward()
    wrapped.schedule.after_backward()
    account = handle.ledger.accounts["weights"]
    # the layer that nobody uses makes up the root
    assert account.collectives - account.extra_collectives == 1 + 1 + 5 + 4


def test_collected_gradients_are_zero_where_there_are_none():
    """Whatever an earlier unit left in the memory: zeros at the end share scales of codecs."""
    parameters = parameters_of([(2, 3), (3,), (2,)])
    unit = stored(parameters, 0, 4)
    for number, (name, parameter) in enumerate(parameters.items()):
        if name != "p1":
            parameter.grad = torch.full(parameter.shape, number + 1.0)
    vector = torch.full((12,), torch.nan)
    unit.collect(vector)
    assert vector.tolist() == [1.0] * 6 + [0.0] * 3 + [3.0] * 2 + [0.0]


SHAPES = st.lists(
    st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple), min_size=1, max_size=5
)


def parameters_of(shapes: list[tuple[int, ...]]) -> dict[str, nn.Parameter]:
    return {f"p{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate(shapes)}


def stored(parameters: dict[str, nn.Parameter], rank: int, world_size: int) -> FlatUnit:
    unit = FlatUnit("unit", parameters, rank, world_size)
    unit.store()
    return unit


@given(SHAPES, st.integers(1, 5))
def test_shards_of_all_ranks_together_are_the_parameters(shapes, world_size):
    values = {name: p.detach().clone() for name, p in parameters_of(shapes).items()}
    units = [
        stored({k: nn.Parameter(v.clone()) for k, v in values.items()}, rank, world_size)
        for rank in range(world_size)
    ]
    together = torch.cat([unit.shard.data for unit in units])
    assert len({unit.shard.numel() for unit in units}) == 1
    assert not together[sum(v.numel() for v in values.values()) :].any()
    for name, part in named_parts(together, units[0].shapes).items():
        assert torch.equal(part, values[name])
