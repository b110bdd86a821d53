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
from shardlab.comm import deferred
from shardlab.devices.registry import accelerator_of
from shardlab.engines.slide.engine import SlideEngine
from shardlab.transport.background import Background
from tests.devices.simulated_device import SimulatedDevice, simulated
from tests.engines.engine_cases import HYBRID, LOSSY, SLIDE, STRATEGIES
from tests.engines.slide.small_engine import batch_of, engine_of, train
from tests.ranks import run_ranks

CPU = torch.device("cpu")
MICRO = 2
OFFLOADED = {
    f"{engine}-{where}": {
        "engine": engine,
        "activation_checkpointing": "full",
        "activations": where,
    }
    for engine in ("manual", "slide")
    for where in ("memory", "disk")
}
UNUSED = {"manual-unused": {"engine": "manual", "prefetch": 2, "reshard_after_forward": False}}
"""the model does not call its last block, whose gather no later one of the step comes after"""
CASES: dict[str, dict[str, Any]] = {
    **{name: each for name, each in STRATEGIES.items() if each["engine"] == "manual"},
    **{name: STRATEGIES[name] for name in (*SLIDE, "ddp", "fsdp1", "fsdp2")},
    **{name: LOSSY[name] for name in ("manual-topk", "slide-topk", "slide-int8")},
    **{name: LOSSY[name] for name in ("ddp-int8", "ddp-topk")},
    **{f"{e}-bf16": {"engine": e, "param_dtype": "bf16"} for e in ("manual", "slide")},
    "slide-moments": {"engine": "slide", "moments": "disk"},
    **OFFLOADED,
    **UNUSED,
}

FEW = ("manual-memory", "slide-shard-gpu", "ddp")
"""the cases that are tried each time"""
NEEDLESS = {
    "wait: GradOffload._copy_part < ErrorRelay.guard.<locals>.guarded": "raises an error: a lane "
    "has an order of its own",
    "wait: ActivationStore._tidy < ActivationStore.put": "what is dropped and was not taken: "
    "tests/devices/test_races.py",
    "wait: Deferred._copy < Deferred.settle": "between steps: the host has read the last loss",
}
"""calls that no memory needs, and what they are for"""


def run(group: dist.ProcessGroup, name: str, briefly: bool = False) -> Tensor:
    """Train, look at the states in between, and let the engine end.

    Args:
        briefly: one step is all.
    """
    document, rank = CASES[name], dist.get_rank(group)
    if document.get("activations") == "memory" and accelerator_of(CPU) is None:
        document = {**document, "activations": "device"}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {FOLDER_VARIABLE: folder}),
    ):
        # the last inputs of blocks never leave
        engine = engine_of(group, document, layers=8 if name in OFFLOADED else 4)
    micro = MICRO
    if name in UNUSED:
        shorten(engine)
        micro = 1
    if briefly:
        return train(engine, 1, micro)
    found = [train(engine, 2, micro)]
    if isinstance(engine, SlideEngine):
        for parameter in engine.in_host_memory()["parameter"].values():
            parameter.mul_(1)
        with torch.no_grad():  # fetches more than it waits for
            engine.module(input_ids=batch_of(0, rank)[:, :-1])
        engine.take_in()
    found.append(train(engine, 2, micro, first=2))
    engine.ledger.summary()
    return torch.cat(found)


def simulate(
    group: dist.ProcessGroup, name: str, seed: int, removed: str = "", briefly: bool = False
) -> tuple[SimulatedDevice, Tensor]:
    with (
        patch.object(deferred, "EVERY", 3),
        simulated(1000 * seed + dist.get_rank(group), removed) as device,
    ):
        found = run(group, name, briefly)
    return device, found


def shorten(engine: Any) -> None:
    """Leave out the last block of a GPT-2 from its forward pass."""
    [model] = engine.module._model
    model.transformer.h = model.transformer.h[:-1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.long)
        for name in CASES
        # of two groups as the case that reduces more often; of disks as slide, and below
        if name not in ("manual-hybrid", "manual-disk")
    ],
)
def test_losses_are_those_of_the_cpu_and_nothing_races(name: str) -> None:
    def on_rank(group: dist.ProcessGroup) -> None:
        expected = run(group, name)
        # delays differ by rank; vector clocks see the races of any other order as well
        device, found = simulate(group, name, 0)
        assert torch.equal(found, expected)
        orders: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(orders, device.collectives, group)
        # NCCL may hang where ranks launch on several communicators in several orders
        assert all(each == orders[0] for each in orders)

    run_ranks(4 if name in HYBRID else 2, on_rank)


FAULTY = (
    *("manual", "manual-native", "slide-full-cpu", "slide-shard-gpu", "manual-unused"),
    *("manual-memory", "manual-disk", "manual-topk", "ddp-topk"),
)
"""those whose steps take the least time come first: later ones try what is not found there"""


@pytest.mark.long
@pytest.mark.timeout(1200)  # some fifty trainings
def test_every_wait_that_is_removed_is_found() -> None:
    """In one of the cases: others may wait twice."""

    def on_rank(group: dist.ProcessGroup) -> None:
        caught: dict[str, bool] = {}
        places = {name: [*simulate(group, name, 0)[0].places] for name in FAULTY}
        every = [places]
        dist.broadcast_object_list(every, 0, group)
        # most are found in the first step of some case: only the others take more of them
        for briefly in (True, False):
            for name, of_case in every[0].items():
                for place in of_case:
                    if caught.get(place) or place in NEEDLESS:
                        continue
                    device, _ = simulate(group, name, 0, place, briefly)
                    found = torch.tensor(len(device.races.found))
                    dist.all_reduce(found, group=group)
                    caught[place] = bool(found)
        assert caught
        assert [place for place, found in caught.items() if not found] == []
        assert NEEDLESS.keys() <= {place for of_case in every[0].values() for place in of_case}

    run_ranks(2, on_rank, timeout_s=900)


@pytest.mark.long
def test_collectives_of_two_threads_have_several_orders() -> None:
    """Each communicator has a thread of its own."""

    def on_rank(group: dist.ProcessGroup) -> None:
        begin = Background.__init__

        def alone(self: Background, name: str, device: Any = None, beside: Any = None) -> None:
            begin(self, name, device)

        for name in "manual", "slide-shard-gpu":
            orders = set()
            with patch.object(Background, "__init__", alone):
                for seed in range(2):
                    orders.add(tuple(simulate(group, name, seed)[0].collectives))
            every: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, orders, group)
            assert len(set.union(*every)) > 1, name

    run_ranks(2, on_rank)
