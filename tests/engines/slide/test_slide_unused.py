"""What a model does not use in a step, perhaps on one rank alone, has a gradient of zero."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import shardlab
from tests.engines.slide.sliding import MODES, DelayedCopies, engine_of, train

STEPS, BLOCKS = 4, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden, both):
        more = torch.tanh(self.second(hidden)) if both else 0
        return hidden + torch.tanh(self.first(hidden)) + more


class Experts(nn.Module):
    """Leaves out a block, or half of one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.outward = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x, labels, half=None, without=None):
        hidden = self.inward(x)
        for number, block in enumerate(self.blocks):
            if number != without:
                hidden = block(hidden, number != half)
        return SimpleNamespace(loss=((self.outward(hidden) - labels) ** 2).mean())


def batch_of(step, rank, left_out, block):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, labels = torch.randn(2, 4, 8, generator=generator)
    unused = {left_out: block} if rank == 1 and step % 2 else {}
    return {"x": x, "labels": labels, **unused}


def by_hand(left_out, block, clip):
    model = Experts()
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    for step in range(STEPS):
        for rank in range(2):
            (model(**batch_of(step, rank, left_out, block)).loss / 2).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("sync", ["cpu_reduce", "gpu_reduce"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("left_out", ["half", "without"])
@pytest.mark.parametrize("block", [0, 2])
def test_what_one_rank_leaves_out_trains_on_with_the_others(block, left_out, clip, sync):
    expected = by_hand(left_out, block, clip)

    def on_rank(group):
        config = shardlab.SlideConfig(
            learning_rate=1e-3, clip=clip, grad_sync=sync, activation_checkpointing="none"
        )
        sliding = shardlab.SlideFSDP(Experts(), config)
        sliding._engine._schedule.window.poison = True
        for step in range(STEPS):
            sliding(**batch_of(step, dist.get_rank(group), left_out, block))
        for name, value in sliding.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        return {}

    run_ranks(2, on_rank)


@pytest.mark.parametrize("mode", ["full-cpu_reduce", "shard-gpu_reduce"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_each_step_counts_what_moved_for_it(mode, clip):
    def on_rank(group):
        engine = engine_of(group, MODES[mode], clip=clip, copies=DelayedCopies(0))
        moved = [0.0]
        for step in range(5):
            train(engine, 1, first=step)
            moved.append(engine.ledger.summary()["weights"]["bytes_raw"])
        return {"moved": torch.tensor(moved).diff()}

    for found in run_ranks(2, on_rank):
        later = found["moved"][1:]
        assert later[0] > 0 and (later == later[0]).all(), found["moved"]
