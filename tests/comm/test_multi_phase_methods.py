"""Multi-phase methods: the sums that each sends without loss."""

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.base import Block, Unit
from tests.comm.phase_vectors import LAYOUTS, UNIT, Call, gradients, joined
from tests.comm.wire import vector_of
from tests.ranks import on_ranks

both_ways = pytest.mark.parametrize("how", list(LAYOUTS))


def of_low_rank(rank: int, step: int, columns_space: int = 3) -> list[torch.Tensor]:
    """Matrices of full rank on no rank: the sum over ranks has `columns_space` dimensions."""
    generator = torch.Generator().manual_seed(step)
    right = [torch.randn(columns_space, b.columns, generator=generator) for b in UNIT.blocks]
    own = torch.Generator().manual_seed(100 * step + rank + 1)
    return [
        torch.randn(b.rows, columns_space, generator=own) @ r
        for b, r in zip(UNIT.blocks, right, strict=True)
    ]


def summed(matrices, world_size, how):
    total = [sum(parts) for parts in zip(*(matrices(r) for r in range(world_size)), strict=True)]
    return LAYOUTS[how](total, world_size)


@both_ways
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_powersgd_sends_sums_of_low_rank_exactly(group, how, world_size):
    call, rank = Call(group, "powersgd:rank=3", how), dist.get_rank(group)
    # after a step of zeros and one of a single dimension, too
    call(torch.zeros_like(call.lay_out(gradients(0, 0))), 0)
    call(call.lay_out(of_low_rank(rank, 1, 1)), 1)
    call(call.lay_out(of_low_rank(rank, 2)), 2)
    result, _ = call(call.lay_out(of_low_rank(rank, 3)), 3)
    exact = summed(lambda rank: of_low_rank(rank, 3), world_size, how)
    torch.testing.assert_close(joined(result, group, how), exact, rtol=1e-3, atol=1e-3)


@both_ways
@on_ranks(2)
def test_powersgd_goes_on_from_the_space_of_the_last_step(group, how):
    """Its warm start is power iteration: one sum again and again is sent as well as rank 2 can,
    and the first time worse (Vogels et al. 2019, section 3)."""
    call = Call(group, "powersgd:rank=2", how, Unit("one", (Block("m", 40, 30),)))
    generator = torch.Generator().manual_seed(3)
    left, right = (
        torch.linalg.qr(torch.randn(size, 30, generator=generator)).Q for size in (40, 30)
    )
    values = 0.7 ** torch.arange(30.0)
    exact = left @ values.diag() @ right.T
    vector = call.lay_out([exact / 2])
    errors = []
    for step in range(30):
        result = joined(call(vector, step)[0], group, how)
        errors.append(float((result - call.lay_out([exact])).norm()))
    best = float(values[2:].norm())
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


@both_ways
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_sketch_sends_the_largest_elements_of_the_sum_exactly(group, how, world_size):
    n, large = 6000, 12

    def vectors():
        """Large only in the sum; on single ranks hidden below elements that cancel."""
        generator = torch.Generator().manual_seed(1)
        noise = 0.001 * torch.randn(world_size, n, generator=generator)
        cancelling = 50 * torch.randn(world_size, n, generator=generator)
        cancelling -= cancelling.mean(0)
        places = torch.randperm(n, generator=generator)
        signal = torch.zeros(world_size, n)
        signal[:, places[:large]] = torch.randn(world_size, large, generator=generator) + 30.0
        signal[:, places[large:40]] += cancelling[:, places[large:40]]
        return signal + noise

    call = Call(group, "sketch:rows=7,width=0.1,density=0.01", how, Unit("flat"))
    result, rest = call(vectors()[dist.get_rank(group)].contiguous(), 0)
    result, exact = joined(result, group, how), vectors().sum(0)
    found = exact.abs() > 10
    assert found.sum() == large
    torch.testing.assert_close(result[found], exact[found], rtol=1e-6, atol=1e-6)
    assert not rest[found].any()


@both_ways
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_gradiveq_sends_slices_of_few_dimensions_exactly(group, how, world_size):
    n, size, dimensions = 12 * 40, 40, 5

    def vector(rank, step):
        generator = torch.Generator().manual_seed(7)
        space = torch.randn(dimensions, size, generator=generator)
        own = torch.Generator().manual_seed(100 * step + rank)
        return (torch.randn(n // size, dimensions, generator=own) @ space).flatten()

    call = Call(group, "gradiveq:slice=40,components=5,refresh=4", how, Unit("flat"))
    for step in range(5):
        result, _ = call(vector(dist.get_rank(group), step), step)
        exact = sum(vector(rank, step) for rank in range(world_size))
        torch.testing.assert_close(joined(result, group, how), exact, rtol=1e-4, atol=1e-4)
    renewed = call.ledger.accounts["gradients"].uncompressed
    assert renewed == {"renews the principal components": 2}


@both_ways
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_shared_integers_lose_half_a_step_per_rank_and_nothing_in_the_sum(group, how, world_size):
    call, rank = Call(group, "int8-shared:group=8", how), dist.get_rank(group)
    vector = call.lay_out(gradients(rank, 0))
    result, rest = call(vector, 0)
    every = torch.stack([call.lay_out(gradients(r, 0)) for r in range(world_size)])
    groups = torch.nn.functional.pad(every.abs().amax(0), (0, -vector.numel() % 8)).view(-1, 8)
    steps = (groups.amax(1) / (127 // world_size)).repeat_interleave(8)[: vector.numel()]
    assert (rest.abs() <= steps * (0.5 + 1e-4)).all()
    # integers times one step: sums of what was sent, without another rounding
    sent = joined(result, group, how) / steps.clamp(min=1e-30)
    assert (sent - sent.round()).abs().max() < 1e-3
    torch.testing.assert_close(
        joined(result, group, how), every.sum(0), rtol=0, atol=float(world_size * steps.max() / 2)
    )


@on_ranks(4)
def test_shared_integers_move_one_byte_an_element_and_one_scale_a_group(group):
    call = Call(group, "int8-shared:group=128", "sum", Unit("u", (Block("m", 64, 64),)))
    call(vector_of(dist.get_rank(group), 4096), 0)
    account = call.ledger.accounts["gradients"]
    assert account.bytes_wire == 2 * 3 / 4 * (4096 + 4 * 4096 / 128)
    assert account.metadata_bytes == 2 * 3 / 4 * 4 * 4096 / 128
