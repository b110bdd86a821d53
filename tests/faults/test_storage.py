"""Errors of the disk are one line, harm no output, and cost at most one checkpoint interval."""

import subprocess
import sys

import pytest

from tests.faults.storage import ERRORS, HEADING

_STAGES = "prepare", "tokenize", "train"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_failing_writes_of_a_stage_are_one_line_and_harm_nothing():
    """A sample of `python -m tests.faults.storage` (attack 10 of the review)."""
    command = [sys.executable, "-m", "tests.faults.storage", "1", *_STAGES]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    rows = done.stdout.splitlines()
    assert rows[0] == HEADING and len(rows) == 1 + len(_STAGES) * len(ERRORS), done.stdout
