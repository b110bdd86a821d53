"""The benchmarks of GPUs run without one, with small sizes, and measure nothing twice."""

from pathlib import Path

import pytest

import benchmarks.gpu  # noqa: F401 - for its imports, which the commands are forked with
from tests.commands import typed
from tests.pipeline.workspace import ROOT

PARTS = {"copies": "| to device |"}
LONG = {"kernels": "| int8 |", "codecs": "| top-k 1 % |"}
LONG |= {"offload": "| slide, largest |", "training": "| ddp-int8 |"}


@pytest.mark.parametrize(
    ("part", "row"),
    [*PARTS.items(), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG.items())],
)
def test_a_part_shows_what_it_measured_once(part: str, row: str, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--small", "--work", str(tmp_path / "work"))
    for number, measured in enumerate((True, False)):
        folder = tmp_path / f"command{number}"
        command = typed(folder, ROOT, "benchmarks.gpu", part, *options)
        assert command.wait() == 0 and row in command.said(), command.said()
        assert (": measured" in command.said()) == measured
