"""The benchmarks of GPUs run without one, with small sizes, and measure nothing twice."""

from pathlib import Path

import pytest

from tests.commands import ROOT, typed

PARTS = {"copies": "| to device |"}
LONG = {"kernels": "| int8 |", "codecs": "| top-k 1 % |"}
LONG |= {"offload": "| slide, 2 |", "training": "| ddp-int8 |"}


@pytest.mark.parametrize(
    ("part", "row"),
    [*PARTS.items(), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG.items())],
)
def test_a_part_shows_what_it_measured_once(part: str, row: str, tmp_path: Path) -> None:
    arguments = [part, "--device", "cpu", "--small", "--work", str(tmp_path / "work")]
    for measured in (True, False):
        folder = tmp_path / f"measured-{measured}"
        command = typed(folder, ROOT, "benchmarks.gpu", *arguments)
        assert command.wait() == 0 and row in command.said(), command.said()
        assert (": measured" in command.said()) == measured
