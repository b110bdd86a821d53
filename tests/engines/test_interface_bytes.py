"""The ledger counts every byte that a rank sends: its interface differs by headers alone."""

import time

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.emulated_link import Links, interface_bytes, interface_frames
from shardlab.config.machine import FRAME_HEADERS, Link
from shardlab.config.model_and_data import Model
from shardlab.config.strategy import parse_strategy
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from tests.ranks import run_ranks

LENGTH, STEPS = 32, 2
# messages so large that what is sent beside them does not count
STRATEGIES = [
    *(({"engine": engine}, 8_000) for engine in ("ddp", "fsdp2", "manual")),
    ({"engine": "ddp", "gradients": {"codec": "int8"}}, 50_257),
    *(
        pytest.param({"engine": "ddp", "gradients": {"codec": c}}, 50_257, marks=pytest.mark.long)
        for c in ("topk", "powersgd")
    ),
]


def counters(group):
    """Bytes and frames that this rank has sent so far."""
    dist.barrier(group)
    time.sleep(0.3)  # what was handed to the kernel is on the link by then
    return torch.tensor([interface_bytes(), interface_frames()], dtype=torch.float64)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "vocabulary"), STRATEGIES, ids=str)
def test_ledger_and_interface_differ_by_headers_alone(permitted, strategy, vocabulary):
    def on_rank(group):
        model = build_model(Model(preset="tiny"), vocabulary, LENGTH, 0, seed=1).whole()
        optimization = Optimization(weight_decay=0.1, clip=1.0)
        engine = build_engine(model, parse_strategy(strategy), optimization, group)
        generator = torch.Generator().manual_seed(dist.get_rank(group))

        def steps():
            for _ in range(STEPS):
                tokens = torch.randint(vocabulary, (1, LENGTH + 1), generator=generator)
                engine.step([tokens], 1e-3)

        steps()
        engine.ledger.reset()
        before = counters(group)
        steps()
        sent = sum(account.bytes_wire for account in engine.ledger.accounts.values())
        return {"ledger": torch.tensor(sent), "interface": counters(group) - before}

    with Links(2, Link(rate="1gbit")) as links:
        ranks = run_ranks(2, on_rank, links=links)
    ledger = sum(float(rank["ledger"]) for rank in ranks)
    nbytes, frames = sum(rank["interface"] for rank in ranks).tolist()
    assert ledger <= nbytes - FRAME_HEADERS * frames < 1.01 * ledger
    assert nbytes < 1.03 * ledger
