"""All evidence of a report, made for tests, with a forecast made as well."""

from typing import Any

import pandas as pd

from shardlab.predict.extrapolation import BreakEven, Point
from shardlab.predict.results import Check, ForecastDocument, summarize
from shardlab.report.evidence import Evidence
from shardlab.report.settings import Quality
from shardlab.results.train_result import TrainResult
from tests.record_factory import BASELINE, STRATEGIES, make_history, make_losses
from tests.timed_run_factory import make_timed, make_timings


def make_forecast(runs: list[str] | None = None, **changes: Any) -> ForecastDocument:
    """A forecast of made timings; `changes` replace fields. Errors alternate around nothing."""
    named = [*(runs or STRATEGIES)]
    checks = [
        Check(
            timing="fast",
            run=run,
            world_size=2,
            link="1000mbit",
            held_out=run != BASELINE,
            predicted_ms=40.0 + number,
            low_ms=39.0 + number,
            high_ms=41.0 + number,
            measured_ms=40.0,
            error=number / 40,
        )
        for number, run in enumerate(named)
    ]
    points = [
        Point(
            run=run,
            link=link,
            ranks=n,
            step_ms=20.0 + n,
            low_ms=19.0 + n,
            high_ms=21.0 + n,
            compute_ms=20.0,
        )
        for run in named
        for link in ("ethernet-10g", "dgx-h100")
        for n in (8, 1024)
    ]
    facts: dict[str, Any] = {
        "fitted_on": ["two-ranks/fsdp2"],
        "summary": summarize(checks),
        "checks": checks,
        "left_out": {"fsdp2-sketch": "the model does not support codec sketch"},
        "operations": [],
        "engines": [],
        "wait_ms": 2.0,
        "points": points,
        "links": {"ethernet-10g": "made for tests", "dgx-h100": "made for tests"},
        "break_even": [
            BreakEven(
                run="fsdp2-int8",
                codec="int8:group=128",
                ratio=0.26,
                exposed=2.1e9,
                step=1.4e9,
                always=False,
            ),
            BreakEven(
                run="fsdp2-int4",
                codec="int4:group=128",
                ratio=0.13,
                exposed=1.9e9,
                step=None,
                always=True,
            ),
        ],
        "assumptions": ["Every rank computes as here."],
        "warnings": [],
    }
    return ForecastDocument(**{**facts, **changes})


def make_evidence(records: list[TrainResult], baseline: str = BASELINE, **changes: Any) -> Evidence:
    """Evidence around given records; `changes` replace its fields.

    Runs that the timings lack are added to the timing whose steps are compared. All timings took
    turns.
    """
    losses: dict[str, dict[int, pd.Series]] = {}
    for record in records:
        losses.setdefault(record.run, {})[record.seed] = pd.Series(
            make_losses(record.run, record.seed)
        )
    facts: dict[str, Any] = {
        "records": records,
        "baseline": baseline,
        "losses": losses,
        "validation": {},
        "history": make_history(records),
        "source": {
            "name": "wikipedia",
            "licence": "CC BY-SA 4.0",
            "documents": 10_084,
            "bad_records": {"count": 2, "reasons": {"no text": 2}},
        },
        "statistics": {"vocabulary": 2048, "length": {"mean": 234.1}, "pad_ratio": 0.0},
        "timed": make_timings(),
        "comparison": "two-ranks",
        "quality": Quality(train_loss=(7.0, 5.5), time_s=(1.0, 4.0)),
        "tolerance": 0.03,
        "is_searched": True,
        "predicted": make_forecast(),
        **changes,
    }
    timed = {run.run for run in facts["timed"] if run.timing == facts["comparison"]}
    lacking = [make_timed(facts["comparison"], run) for run in losses if run not in timed]
    timed_runs = [*facts["timed"], *lacking]
    # as where one timing holds all others
    turns = {run.timing: facts["comparison"] for run in timed_runs}
    return Evidence(**{"turns": turns, **facts, "timed": timed_runs})
