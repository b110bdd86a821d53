"""Flat units: sharding, gathering and collection of gradients lose nothing."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from shardlab.engines.manual_unit import FlatUnit
from torch import nn

from shardlab.engines.flat import named_parts

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


@given(SHAPES, st.integers(1, 4))
def test_parameters_see_what_is_gathered(shapes, world_size):
    parameters = parameters_of(shapes)
    unit = stored(parameters, 0, world_size)
    assert not unit.allocated
    unit.allocate()
    with torch.no_grad():
        unit.full.copy_(torch.arange(unit.full.numel()))
    assert [p.flatten().tolist() for p in parameters.values()] == [
        part.flatten().tolist() for part in named_parts(unit.full, unit.shapes).values()
    ]
    unit.free()
    assert not unit.allocated


@given(SHAPES, st.integers(1, 4), st.data())
def test_gradients_are_collected_where_their_parameters_lie(shapes, world_size, data):
    parameters = parameters_of(shapes)
    unit = stored(parameters, 0, world_size)
    gradients = {}
    for name, parameter in parameters.items():
        if data.draw(st.booleans()):
            parameter.grad = torch.randn(parameter.shape)
            gradients[name] = parameter.grad.clone()
    vector = torch.full((unit.full.numel(),), torch.nan)
    unit.collect(vector)
    for name, part in named_parts(vector, unit.shapes).items():
        assert torch.equal(part, gradients.get(name, torch.zeros_like(part)))
    assert vector.isfinite().all()
    assert all(parameter.grad is None for parameter in parameters.values())


def test_saved_tensors_are_restored_by_gathering():
    weight = nn.Parameter(torch.randn(4, 4))
    unit = stored({"weight": weight}, 0, 1)
    unit.allocate()
    with torch.no_grad():
        unit.full.copy_(unit.shard)
    x = torch.randn(2, 4, requires_grad=True)
    y = nn.functional.linear(x, weight)
    unit.free()
    unit.allocate()
    with torch.no_grad():
        unit.full.copy_(unit.shard)
    y.sum().backward()
    [stored_weight] = named_parts(unit.shard.data, unit.shapes).values()
    torch.testing.assert_close(x.grad, torch.ones(2, 4) @ stored_weight)
