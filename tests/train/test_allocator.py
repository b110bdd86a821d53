"""Freed host memory stays with a rank."""

import json
import os
import statistics
import subprocess
import sys

import pytest

_STEPS = """
import json
import resource
import torch
from shardlab.train.allocator import keep_freed_memory

{before}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(5 << 20) for _ in range(3)]  # 20 MiB each
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(json.dumps([faults() for _ in range(13)]))
"""
_PAGES = 3 * 20 * 256
"""of the blocks of a step"""


@pytest.mark.parametrize("kept", [False, True])
def test_steps_fault_in_no_pages_that_were_there(kept: bool) -> None:
    program = _STEPS.format(before="keep_freed_memory()" if kept else "")
    # glibc adapts its default to what was freed, at times to blocks as large as these
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    # of the middle step: the heap grows by a block in any one where fragments are in the way
    faults = statistics.median(json.loads(done.stdout))
    # else the test would tell nothing
    assert faults < _PAGES / 100 if kept else faults > _PAGES / 2
