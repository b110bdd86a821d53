"""Law of the asynchronous forms: start and wait equal the blocking collective, bit for bit."""

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.build import make_collective
from shardlab.comm.collective import CompletedWork, Native
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Account, Ledger
from tests.comm.codec_factory import ROUTES
from tests.ranks import on_ranks

SIZE = 1 << 12
UNIT = Unit("unit", (Block("matrix", 64, 60), Block("bias", 256, 1)))
TIMES = {"extra_collective_s", "encode_s", "decode_s"}


def counts(account: Account):
    return {name: value for name, value in vars(account).items() if name not in TIMES}


def reduced(collective, rank, started):
    """The results of two steps of each collective."""
    size, results = collective.world_size, []
    generator = torch.Generator().manual_seed(rank)

    def run(name, *arguments, unit=UNIT):
        if started:
            assert getattr(collective, f"start_{name}")(*arguments, unit).wait()
        else:
            getattr(collective, name)(*arguments, unit)

    for _ in range(2):
        vector, shard = torch.randn(SIZE, generator=generator), torch.empty(SIZE // size)
        run("reduce_scatter", shard, vector, 1 / size)
        gathered = torch.empty(SIZE)
        run("all_gather", gathered, shard)
        run("all_reduce", vector, 1 / size, unit=UNIT._replace(name="whole"))
        results += [shard, gathered, vector]
    return results


@pytest.mark.parametrize("route", ROUTES)
@on_ranks(4)
def test_start_and_wait_equal_the_blocking_form(group, route) -> None:
    ledgers = Ledger(), Ledger()
    blocking, started = (
        reduced(
            make_collective(group, ledger, "gradients", ROUTES[route], ErrorFeedback()),
            dist.get_rank(group),
            asynchronous,
        )
        for ledger, asynchronous in zip(ledgers, (False, True), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(blocking, started, strict=True))
    first, second = (counts(ledger.accounts["gradients"]) for ledger in ledgers)
    assert first == second


def test_completed_work_has_its_result():
    result = torch.ones(3)
    work = CompletedWork(result)
    assert work.is_completed() and work.wait()
    assert work.get_future().value()[0] is result


@on_ranks(2)
def test_the_future_of_an_all_reduce_holds_the_vector(group) -> None:
    vector = torch.full((4,), float(dist.get_rank(group)))
    work = Native(group, Ledger(), "gradients").start_all_reduce(vector, 0.5, UNIT)
    (result,) = work.get_future().wait()
    assert result is vector and work.is_completed() and vector.eq(0.5).all()
