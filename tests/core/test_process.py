"""Processes end with their parents."""

import subprocess
import sys

import pytest

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


ENDED = """
import os, signal, sys, time, weakref
from shardlab.core.process import on_end_signals

def end(number):
    raise SystemExit(128 + number)

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGTERM)

class Interrupting:
    __del__ = interrupt

class Plain:
    pass

on_end_signals(end)
try:
    DO
    time.sleep(30)
finally:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    print("put in order")
"""
DROPPING = {
    "del": "Interrupting()",
    "weak reference": "plain = Plain(); reference = weakref.ref(plain, interrupt); del plain",
    "hook of fork": "os.register_at_fork(after_in_parent=interrupt); os.fork() or os._exit(0)",
    "nothing": "interrupt()",
}


@pytest.mark.parametrize("situation", DROPPING)
def test_a_signal_ends_a_process_also_where_python_drops_errors(situation: str) -> None:
    """It ends once, so that its clean-up is not interrupted."""
    script = ENDED.replace("DO", DROPPING[situation])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (143, "put in order\n", "")
