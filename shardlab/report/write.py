"""All files of the report, from records and what stands beside them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.agent.records.history import History
from shardlab.core.files import atomic, write_json, write_json_lines, write_text
from shardlab.experiment.schema import Quality
from shardlab.forecast.results import ForecastDocument
from shardlab.records.run import Record
from shardlab.records.timing import TimedRun
from shardlab.report.aggregate import comparison, loss_curves
from shardlab.report.forecast_plots import draw_forecast
from shardlab.report.forecast_room import ForecastRoom, forecast_room
from shardlab.report.page import render
from shardlab.report.plots import draw_all, save
from shardlab.report.search import outcome, rounds_table
from shardlab.report.summary import comparison_rows, summary
from shardlab.report.tables import (
    Table,
    definitions,
    environment,
    escape,
    facts,
    hashes,
    headline_markdown,
    run_tables,
    seed_warning,
    setting_line,
    text_table,
)
from shardlab.report.timing_plots import draw_timings
from shardlab.report.timing_room import TimingRoom, timing_room


@dataclass(frozen=True)
class Evidence:
    """Everything that a report is made from."""

    records: list[Record]
    """of every run and seed, in the order of the runs"""
    baseline: str
    losses: dict[str, dict[int, dict[int, float]]]
    """run -> seed -> step -> training loss"""
    history: History
    source: dict[str, Any]
    statistics: dict[str, Any]
    timed: list[TimedRun]
    """of every timing"""
    quality: Quality
    predicted: ForecastDocument


def write_report(evidence: Evidence, folder: Path) -> None:
    """The page, tables.md, headline.md, summary.json, plots/, and the figures as CSV and JSON.

    Equal evidence gives equal files, byte for byte.
    """
    records, baseline = evidence.records, evidence.baseline
    runs = list(dict.fromkeys(record.run for record in records))
    compared = comparison(records, runs, baseline)
    losses = loss_curves(evidence.losses)
    tables = run_tables(compared, records, baseline)
    ranks = records[0].world_size
    room = timing_room(evidence.timed, evidence.losses, evidence.quality, ranks, baseline)
    figures = draw_all(compared, losses, baseline)
    figures |= draw_timings(room.timed, room.groups, runs, baseline)
    predicted = forecast_room(evidence.predicted)
    figures |= draw_forecast(predicted.points, runs, baseline)
    for name, figure in figures.items():
        for kind in ("svg", "png"):
            with atomic(folder / "plots" / f"{name}.{kind}") as temporary:
                save(figure, temporary, kind)
    _write_csv(compared.reset_index(), folder / "comparison.csv")
    _write_csv(losses, folder / "loss.csv")
    _write_csv(room.timed, folder / "timings.csv")
    write_json_lines(folder / "comparison.jsonl", comparison_rows(compared))
    write_json(folder / "summary.json", summary(compared, evidence.history))
    write_text(folder / "headline.md", headline_markdown(tables["headline"], records))
    write_text(folder / "tables.md", _all_tables(tables, room, predicted, evidence))
    page = render(
        compared,
        tables,
        figures,
        room,
        predicted,
        records,
        evidence.history,
        baseline,
        evidence.source,
        evidence.statistics,
    )
    write_text(folder / "report.html", page)


def _write_csv(table: pd.DataFrame, path: Path) -> None:
    with atomic(path) as temporary:
        table.to_csv(temporary, index=False, float_format="%.10g", lineterminator="\n")


def _all_tables(
    tables: dict[str, Table], room: TimingRoom, predicted: ForecastRoom, evidence: Evidence
) -> str:
    """Every table of the page in Markdown."""
    titles = {table.title for table in tables.values()}
    named = [
        *tables.values(),
        *room.tables,
        *predicted.tables,
        rounds_table(evidence.history),
        _fact_table("Data", facts(evidence.source)),
        _fact_table("Statistics of the data", facts(evidence.statistics)),
        _fact_table("Environment", environment(evidence.records)),
        hashes(evidence.records),
        definitions(evidence.records),
    ]
    warning = seed_warning(evidence.records)
    few = f"\n{escape(warning)}\n" if warning else ""
    parts = [
        f"## {table.title}\n\n{table.markdown()}{few if table.title in titles else ''}"
        for table in named
    ]
    said = [*room.bottleneck, predicted.verdict, outcome(evidence.history)]
    sentences = setting_line(evidence.records), *said
    lines = map(escape, sentences)
    return "\n".join(["# Tables\n", *(f"{line}\n" for line in lines), *parts])


def _fact_table(title: str, lines: list[tuple[str, str]]) -> Table:
    return text_table(title, ["name", "value"], [list(line) for line in lines])
