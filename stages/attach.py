"""Show what `shardlab.attach` does: two ranks of this machine train a small model, first with their
gradients as they are, then with a codec."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.codecs.registry import make_method
from shardlab.core.progress import stopwatch
from shardlab.train.launch import launch

_RANKS, _WIDTH, _BATCH, _STEPS = 2, 512, 64, 30


def main(demo: bool, gradients: str) -> None:
    """Print what was sent, the loss and the time of a step, with and without the codec.

    Args:
        demo: true; in a script `shardlab.attach` is called.
    """
    make_method(gradients)  # a mistake is one line before ranks start
    launch(partial(_demonstrate, gradients), _RANKS, threads=1, timeout_s=60)
    print("\nBoth ranks share this machine's memory: compression pays on a link, which is slower.")
    print(
        "In your script, once DistributedDataParallel, fully_shard or FullyShardedDataParallel "
        f'has wrapped the model:\n    handle = shardlab.attach(model, gradients="{gradients}")'
    )


def _demonstrate(codec: str, group: dist.ProcessGroup) -> None:
    for gradients in dict.fromkeys(("none", codec)):
        line = _train(gradients, group)
        if dist.get_rank(group) == 0:
            print(line, flush=True)


def _train(gradients: str, group: dist.ProcessGroup) -> str:
    """Train a student on the outputs of a fixed network, and say what happened."""
    torch.manual_seed(0)
    teacher, student = _network(), _network()
    model = DistributedDataParallel(student, process_group=group)
    handle = shardlab.attach(model, gradients=gradients)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank(group))  # each rank has data of its own
    elapsed = stopwatch()
    for _ in range(_STEPS):
        inputs = torch.randn(_BATCH, _WIDTH)
        with torch.no_grad():
            targets = teacher(inputs)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    step_ms, count = 1000 * elapsed() / _STEPS, sum(p.numel() for p in student.parameters())
    return (
        f"gradients {gradients}: {_RANKS} ranks, {count:,} parameters, {_STEPS} steps of "
        f"{step_ms:.0f} ms, loss {loss.item():.4f}\n    {handle}"
    )


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH))
