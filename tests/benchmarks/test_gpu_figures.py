"""The benchmarks of GPUs run without one, with small sizes, and measure nothing twice."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.workspace import ROOT

PARTS = {"copies": "| to device |"}
LONG = {"kernels": "| int8 |", "codecs": "| top-k 1 % |"}
LONG |= {"offload": "| slide, 2 |", "training": "| ddp-int8 |"}


@pytest.mark.parametrize(
    ("part", "row"),
    [*PARTS.items(), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG.items())],
)
def test_a_part_shows_what_it_measured_once(part: str, row: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", part, "--device", "cpu", "--small"]
    for measured in (True, False):
        run = subprocess.run(
            [*command, "--work", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
        )
        assert run.returncode == 0 and row in run.stdout, run.stdout + run.stderr
        assert (": measured" in run.stderr) == measured
