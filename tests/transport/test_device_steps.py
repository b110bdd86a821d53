"""Times of a device's operations are read when it has done them, and nothing waits for it."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardlab.transport.traffic import Traffic
from tests.devices import late_device
from tests.devices.late_device import late_cpu
from tests.devices.simulated_device import simulated

CPU = torch.device("cpu")


class Clock:
    """Time of a device in seconds, which a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class NoWork(dist.Work):
    """Operation whose end is that of its `wait`."""

    def wait(self, timeout=timedelta(0)):
        return True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(late_device, "perf_counter", clock)
    return clock


def operate(traffic, clock, begin, end):
    clock.now = begin
    with traffic.operation(1, CPU):
        clock.now = end


def test_a_step_lasts_as_long_as_some_operation_is_under_way(clock):
    traffic, found = Traffic(), []
    with late_cpu() as device:
        operate(traffic, clock, 0, 1)  # nobody asks for it
        traffic.begin_step(CPU)
        clock.now = 2
        early = traffic.awaited(NoWork, 1, CPU)
        traffic.end_step(found.append)
        assert found == []  # the device may not have come to it
        operate(traffic, clock, 5, 6)  # between the steps
        clock.now = 10
        traffic.begin_step(CPU)
        clock.now = 12
        early.wait()  # 10 to 12 are in this step
        operate(traffic, clock, 11, 14)
        operate(traffic, clock, 20, 21)
        with pytest.raises(ZeroDivisionError), traffic.operation(1, CPU):
            clock.now += 1 / 0
        traffic.end_step(found.append)
        assert (found, device.waits) == ([], 0)
        device.is_idle = True
        traffic.begin_step(CPU)
        traffic.end_step(found.append)
        assert (found, device.waits) == ([0.0, 5.0, 0.0], 0)
        device.is_idle = False
        traffic.begin_step(CPU)
        operate(traffic, clock, 30, 32)
        traffic.end_step(found.append)
        assert len(found) == 3
        for _ in range(2):
            traffic.settle()
            # for the begin of the step and the end of its operation
            assert (found, device.waits) == ([0.0, 5.0, 0.0, 2.0], 2)


def test_the_host_learns_of_the_device_when_it_asks():
    traffic, found = Traffic(), []
    with simulated() as device:
        traffic.begin_step(CPU)
        with device.stream().current(), traffic.operation(1, CPU):
            torch.zeros(4).add_(1)
        known = {**device.races.host}
        traffic.end_step(found.append)
        assert found == [] and device.races.host == known
        traffic.settle()
        assert found[0] > 0 and device.races.host != known
