"""Rare exchanges beside the DiLoCo of torchft: losses and time of the same training.

    make rivals
    python -m benchmarks.torchft_diloco [--data FOLDER] [--preset NAME] [--steps N] [--every H]
                                        [--rivals FOLDER] [--out FOLDER]

Two replicas of one rank each train the same model on the same tokens by AdamW, and exchange every H
steps, uncompressed, with Nesterov momentum 0.9 at 0.7. Each is trained by shardlab and by torchft,
from the same weights. The functions `by_shardlab` and `by_torchft` are what a script needs for
each: torchft has a lighthouse, which runs in the process of rank 0 here, and a store and a manager
per replica, since its replicas may come and go.
"""

import copy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shardlab
from benchmarks.common import DATA, RIVAL_PACKAGES, arguments, on_ranks, publish, text_table
from shardlab.comm.object_collectives import gather_values
from shardlab.core.numbers import figure
from shardlab.data.loader import Batches
from shardlab.data.tokens import open_split
from shardlab.models.build import build_model
from shardlab.models.settings import Model

_LENGTH, _BATCH = 64, 8
_OUTER = {"learning_rate": 0.7, "momentum": 0.9}


@contextmanager
def by_shardlab(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> Iterator[Any]:
    """Exchange by `shardlab.attach`."""
    wrapped = DistributedDataParallel(model)
    handle = shardlab.attach(wrapped, sync={"every": every, **_OUTER}, optimizer=optimizer)
    yield wrapped
    handle.detach()


@contextmanager
def by_torchft(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> Iterator[Any]:
    """Exchange by torchft, whose replica groups are the ranks."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None, "ranks have joined"
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2) if rank == 0 else None
    address = gather_values(None if lighthouse is None else lighthouse.address(), group)[0]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica{rank}",
        hostname="127.0.0.1",
    )
    outer = torch.optim.SGD(
        model.parameters(), _OUTER["learning_rate"], _OUTER["momentum"], nesterov=True
    )
    with DiLoCo(manager, [model], optimizer, outer, sync_every=every):
        yield model
    dist.barrier()
    manager.shutdown()
    if lighthouse is not None:
        lighthouse.shutdown()


def train(
    preset: str, data: Path, steps: int, every: int, rivals: str, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Return the losses of the steps and the seconds of a step of each way, on a rank."""
    sys.path.append(rivals)
    split = open_split(data / "tokens", "train")
    start = build_model(
        Model.model_validate({"preset": preset}), split.vocabulary, _LENGTH, split.end_of_text, 0
    )
    results = {}
    for name, wrap in {"shardlab": by_shardlab, "torchft": by_torchft}.items():
        model = copy.deepcopy(start.whole())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches, losses = Batches(split, _LENGTH, seed=0), []
        with wrap(model, optimizer, every) as wrapped:
            for step in range(steps):
                if step == every:
                    begin = time.perf_counter()
                samples = (2 * step + dist.get_rank(group)) * _BATCH
                losses.append(_step(wrapped, optimizer, batches.batch(samples, _BATCH)))
            seconds = (time.perf_counter() - begin) / (steps - every)
        results[name] = {"losses": losses, "seconds": seconds}
    return results


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    logits = model(input_ids=batch[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def main() -> None:
    """Train both ways and write the page."""
    options = arguments(
        __doc__,
        data=DATA,
        preset="tiny",
        steps=(160, "at least twice H"),
        every=(16, "H"),
        rivals=RIVAL_PACKAGES,
    )
    worker = partial(
        train, options.preset, options.data, options.steps, options.every, str(options.rivals)
    )
    ranks = on_ranks(2, worker)
    rows = []
    for name in ("shardlab", "torchft"):
        losses = [rank[name]["losses"] for rank in ranks]
        last = [sum(each[-options.every :]) / options.every for each in losses]
        rows.append(
            [name, figure(sum(last) / 2, 6), f"{1e3 * max(r[name]['seconds'] for r in ranks):.1f}"]
        )
    pairs = [
        (mine, other)
        for rank in ranks
        for mine, other in zip(*(rank[name]["losses"] for name in ranks[0]), strict=True)
    ]
    largest = max(abs(mine - other) / other for mine, other in pairs)
    headings = ("by", f"mean loss of the last {options.every} steps", "ms per step")
    publish(
        __doc__,
        options.out / "torchft_diloco.md",
        text_table("Training", headings, rows),
        f"Largest relative difference of the {len(pairs)} losses: {largest:.1e}.",
    )


if __name__ == "__main__":
    main()
