"""CPU time of this process, its children, and of everything else on its CPUs."""

import json
import subprocess
import sys
import time

from shardlab.core.cpu_times import CpuMeter

from shardlab.config.contention import Contention
from tests.commands import Command

BUSY = "import sys, time\nprint(flush=True)\nwhile time.process_time() < {0}: pass\n"


def compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def start(seconds: float, **options) -> subprocess.Popen:
    """Start a process that computes for so many CPU seconds, and ends."""
    command = [sys.executable, "-c", BUSY.format(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    process.stdout.readline()
    return process


def test_children_count_as_own_while_they_run_and_when_they_ended():
    meter = CpuMeter()
    compute(0.2)
    ended, running = start(0.2), start(60)
    ended.wait()
    while meter.read()["own"] < 0.7:  # its share of a machine that others use
        time.sleep(0.01)
    assert meter.read()["own"] >= 0.7
    running.kill()
    running.wait()


def test_a_process_of_somebody_else_is_foreign(tmp_path):
    """Its parent is the first process: it is no child of the one that reads."""
    line = f"{sys.executable} -c '{BUSY.format(60)}' > /dev/null 2>&1 & echo $!"
    shell = subprocess.run(["setsid", "sh", "-c", line], capture_output=True, check=True)

    def read():
        meter = CpuMeter()
        time.sleep(1)
        print(json.dumps(meter.read()))

    try:
        # the process of the tests may have children that compute: ranks and servers of other tests
        command = Command(tmp_path / "command", read)
        assert command.wait() == 0, command.said()
    finally:
        subprocess.run(["kill", shell.stdout.decode().strip()], check=True)
    times = json.loads(command.said())
    found = Contention.of([times])
    assert times["own"] < 0.5
    assert found is not None and found.foreign > 0.05
