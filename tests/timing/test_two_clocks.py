"""Timings say what else used their CPUs (attack 18)."""

import subprocess
import sys

import pytest

from shardlab.records.contention import disturbed
from tests.faults.two_clocks import make_projects, time_at_once

BUSY = "while True: pass"


@pytest.mark.long
def test_two_timings_at_once_are_both_marked(tmp_path):
    projects = make_projects(tmp_path, 2, repetitions=60)
    assert all(map(disturbed, time_at_once(projects)))


@pytest.mark.long  # tests/environment/test_cpu_times.py: a busy process is seen
def test_a_timing_beside_a_busy_process_is_marked(tmp_path):
    (project,) = make_projects(tmp_path, 1, repetitions=10)
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            (found,) = time_at_once([project])
        finally:
            busy.kill()
    assert found is not None and disturbed(found)
    assert found.foreign > 0.1
