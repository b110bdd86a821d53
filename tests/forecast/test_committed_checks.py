"""Known answer 9 of the search: in the committed results predictions rank as measurements do."""

import csv
from itertools import combinations

import pytest

from shardlab.config.timing_record import NO_COMMUNICATION
from tests.pipeline.workspace import ROOT

with (ROOT / "results/forecast/checks.csv").open() as file:
    CHECKS = [row for row in csv.DictReader(file) if row["run"] != NO_COMMUNICATION]

_TIE = 0.02
"""relative difference of steps below which medians of 40 repetitions do not rank"""


@pytest.mark.parametrize("timing", sorted({row["timing"] for row in CHECKS}))
def test_predictions_rank_strategies_as_timings_do(timing: str) -> None:
    steps = [
        (float(row["predicted_ms"]), float(row["measured_ms"]))
        for row in CHECKS
        if row["timing"] == timing
    ]
    pairs = [
        (a[0] - b[0]) * (a[1] - b[1])
        for a, b in combinations(steps, 2)
        if abs(a[1] - b[1]) > _TIE * min(a[1], b[1])
    ]
    tau = sum((pair > 0) - (pair < 0) for pair in pairs) / len(pairs)
    assert tau >= 0.6
    _, first = min(steps)
    assert first <= 1.05 * min(measured for _, measured in steps)
