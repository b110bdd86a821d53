"""On a device behind the host, engines compute the same bits, and each of their waits is needed."""

import os
import tempfile
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.activations.checkpoint import FOLDER_VARIABLE
from tests.devices.simulated_device import SimulatedDevice, simulated
from tests.engines.engine_cases import HYBRID, LOSSY, SLIDE, STRATEGIES, make, train
from tests.ranks import run_ranks

OFFLOADED = {
    f"{engine}-{where}": {
        "engine": engine,
        "activation_checkpointing": "full",
        "activations": where,
    }
    for engine in ("manual", "slide")
    for where in ("memory", "disk")
}
OFFLOADED["slide-moments"] = {"engine": "slide", "moments": "disk", "param_transfer": "shard"}
CASES = {
    name: document
    for name, document in {**STRATEGIES, **LOSSY, **OFFLOADED}.items()
    if document["engine"] in ("manual", "slide")
} | {name: STRATEGIES[name] for name in ("ddp", "fsdp1", "fsdp2", "fsdp2-exchange")}


def run(
    group: dist.ProcessGroup, document: dict[str, Any], seed: int, removed: str = ""
) -> tuple[SimulatedDevice, Tensor]:
    """Train, look at the states in between, and let the engine end, on the device."""
    with simulated(1000 * seed + dist.get_rank(group), removed) as device:
        engine = make(group, document)
        micro = 2
        losses = [train(engine, group, 2, micro=micro)]
        engine.shards()
        losses.append(train(engine, group, 1, 2, micro=micro))
        del engine
    return device, torch.cat(losses)


def on_both(group: dist.ProcessGroup, document: dict[str, Any], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {FOLDER_VARIABLE: folder}):
        device, losses = run(group, document, seed)
        if document.get("activations") == "memory":  # which a CPU has no use for
            document = {**document, "activations": "device"}
        expected = train(make(group, document), group, 3, micro=2)
    assert torch.equal(losses, expected)
    others: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(others, device.collectives, group)
    # NCCL may hang where ranks launch on several communicators in several orders
    assert all(each == others[0] for each in others)


@pytest.mark.parametrize("seed, name", enumerate(CASES))
def test_losses_are_those_of_the_cpu_and_nothing_races(seed: int, name: str) -> None:
    run_ranks(4 if name in HYBRID else 2, lambda group: on_both(group, CASES[name], seed))


FAULTY = ("manual", "manual-memory", "manual-disk", *SLIDE, "slide-memory")
NEEDLESS: dict[str, str] = {}
"""places whose wait nothing shows to be needed, and why it is there"""


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTY)
def test_every_wait_that_is_removed_is_found(name: str) -> None:
    def on_rank(group: dist.ProcessGroup) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.environ[FOLDER_VARIABLE] = folder
            places = [*run(group, CASES[name], 0)[0].places]
            dist.broadcast_object_list(places, 0, group)
            missed = []
            for place in places:
                device, _ = run(group, CASES[name], 1, place)
                found = torch.tensor(len(device.races.found))
                dist.all_reduce(found, group=group)
                missed += [place] * (not found)
            if dist.get_rank(group) == 0:
                print(f"{name}: caught {len(places) - len(missed)} of {len(places)}")
            assert {*missed} <= NEEDLESS.keys()

    run_ranks(2, on_rank, timeout_s=900)
