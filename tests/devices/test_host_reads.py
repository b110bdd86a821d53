"""What a device computes stays there: no message makes the host wait for it."""

import json
import subprocess
import sys

import pytest

from tests.pipeline.workspace import ROOT

READERS = {
    "topk": "the number of values at or above the threshold, and the length of coded indices",
    "threshold": "the number of values at or above the threshold, and the length of coded indices",
    "randomk": "the places that were drawn twice",
}
"""codecs of which a read is known, and what they read"""


@pytest.fixture(scope="module")
def reads() -> dict[str, str]:
    """Reads by codec or collective and method, from a process of its own."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.devices.reads"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout)
    return found


def test_no_codec_and_no_collective_reads_from_the_device(reads: dict[str, str]) -> None:
    others = {case: where for case, where in reads.items() if not case.startswith(tuple(READERS))}
    assert len(others) > 150
    assert {case: where for case, where in others.items() if where} == {}


@pytest.mark.parametrize("codec", READERS)
def test_a_known_read_is_found(reads: dict[str, str], codec: str) -> None:
    assert "DataDependent" in reads[f"{codec}.encode"] or "Dynamic" in reads[f"{codec}.encode"]
