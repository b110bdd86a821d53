"""Races: accesses that no wait orders are found, whatever bits come out, and no others."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shardlab.activations.stores import HostStore
from shardlab.codecs.unit import Unit
from shardlab.comm.fsdp1_hooks import _gather
from shardlab.comm.fsdp2_hooks import _AllReduceHook
from shardlab.devices.accelerator import Stream
from shardlab.transport.background import Background
from tests.devices.simulated_device import SimulatedDevice, simulated

CPU = torch.device("cpu")


def write_then_read(device: SimulatedDevice, side: Stream) -> None:
    value = torch.zeros(4)
    with side.current():
        value.add_(1)


def read_then_write(device: SimulatedDevice, side: Stream) -> None:
    value = torch.zeros(4)
    side.wait(device.current_stream().record())
    with side.current():
        value.sum()
    value.add_(1)


def read_what_is_copied(device: SimulatedDevice, side: Stream) -> None:
    host = device.page_locked((4,), torch.float32)
    device.copy(host, torch.ones(4))
    host.tolist()


def write_what_is_copied(device: SimulatedDevice, side: Stream) -> None:
    host = device.page_locked((4,), torch.float32)
    device.copy(torch.ones(4), host)
    host.zero_()


def free_what_is_read(device: SimulatedDevice, side: Stream) -> None:
    value = torch.zeros(4)
    side.wait(device.current_stream().record())
    with side.current():
        value.sum()


def resize_what_is_read(device: SimulatedDevice, side: Stream) -> None:
    value = torch.zeros(4)
    side.wait(device.current_stream().record())
    with side.current():
        value.sum()
    value.untyped_storage().resize_(0)
    device.current_stream().wait(side.record())


def unlock_what_is_copied(device: SimulatedDevice, side: Stream) -> None:
    host = torch.ones(4)
    device.page_lock(host)
    device.copy(torch.ones(4), host)
    device.page_unlock(host)


def start_without_a_wait(device: SimulatedDevice, side: Stream) -> None:
    value = torch.zeros(4)
    side_thread = Background("side", CPU)
    side_thread.start(value.add_, 1).settle()  # as if its `wait` had only joined the thread
    value.sum()
    side_thread.drain()


RACES = [
    write_then_read,
    read_then_write,
    read_what_is_copied,
    write_what_is_copied,
    free_what_is_read,
    resize_what_is_read,
    unlock_what_is_copied,
    start_without_a_wait,
]


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_a_race_is_found(race: Callable[[SimulatedDevice, Stream], None]) -> None:
    with pytest.raises(AssertionError, match="on stream"), simulated() as device:
        race(device, device.stream())
        # what was freed is looked at by the next operation
        torch.zeros(1)


def test_what_waits_is_no_race() -> None:
    with simulated() as device:
        side, value = device.stream(), torch.zeros(4)
        host = device.page_locked((4,), torch.float32)
        side.wait(device.current_stream().record())
        with side.current():
            value.add_(1)
            device.copy(host, value)
        arrived = side.record()
        halves = torch.zeros(8)
        side.wait(device.current_stream().record())
        with side.current():  # other bytes of one tensor
            halves[:4].add_(1)
        halves[4:].add_(1)
        device.current_stream().wait(side.record())
        value.add_(halves[:4])
        arrived.synchronize()
        assert host.tolist() == [1, 1, 1, 1]
        used = torch.zeros(4)
        side.wait(device.current_stream().record())
        with side.current():
            used.sum()
            side.uses(used)
        del used
        torch.zeros(1)


@pytest.mark.parametrize("removed", ["", "uses: _AllReduceHook.__call__"])
def test_fsdp2_keeps_what_the_all_reduce_uses(removed: str) -> None:
    collective = SimpleNamespace(world_size=2, all_reduce=lambda vector, by, _: vector.mul_(by))
    factor = SimpleNamespace(gradient_divide_factor=None)
    hook = _AllReduceHook(collective, Unit("unit"), factor, None)  # type: ignore[arg-type]
    with simulated(removed=removed) as device:
        gradient, side = torch.ones(4), device.stream()
        side.wait(device.current_stream().record())
        with side.current():
            hook(gradient)
        del gradient
        torch.zeros(1)
    assert bool(device.races.found) is bool(removed)


@pytest.mark.parametrize("removed", ["", "uses: _gather"])
def test_fsdp1_keeps_an_offloaded_shard_while_it_is_gathered(removed: str) -> None:
    def all_gather(whole: Tensor, shard: Tensor, _: Unit) -> None:
        whole.view(2, -1).copy_(shard)

    collective = SimpleNamespace(all_gather=all_gather)
    with simulated(removed=removed) as device:
        flat, side = SimpleNamespace(data=torch.ones(4)), device.stream()
        handle = SimpleNamespace(_training_state=None, _offload_params=True, flat_param=flat)
        side.wait(device.current_stream().record())
        with side.current():
            _gather(handle, collective, Unit("unit"), torch.empty(8))  # type: ignore[arg-type]
        del flat.data
        torch.zeros(1)
    assert bool(device.races.found) is bool(removed)


@pytest.mark.parametrize("removed", ["", "wait: ActivationStore._tidy < ActivationStore.put"])
def test_memory_of_what_nobody_takes_is_used_again_after_its_copy(removed: str) -> None:
    with simulated(removed=removed) as device:
        store = HostStore(CPU)
        first, *_ = [store.put(torch.ones(64)) for _ in range(4)]
        store.prefetch(first)
        assert first.loading is not None
        first.loading[1].settle()
        store.drop(first)
        store.put(torch.ones(64))
        store.close()
    assert bool(device.races.found) is bool(removed)
