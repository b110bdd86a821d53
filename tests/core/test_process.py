"""Processes end with their parents."""

import subprocess
import sys

from tests.commands import is_running, wait_for

CHILD = """
import os, sys, time
from shardlab.core.process import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())]).wait()
"""


def test_the_child_ends_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.kill()
    wait_for(lambda: not is_running(child), 10)
