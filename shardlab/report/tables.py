"""The tables as text: cells for the page, Markdown, and the line that says what was compared."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from shardlab.records.run import Record
from shardlab.report.aggregate import ENOUGH_SEEDS
from shardlab.report.cells import Column
from shardlab.report.columns import BREAKDOWN, COMPARISON, HEADLINE
from shardlab.report.efficiency_columns import EFFICIENCY, reached_columns
from shardlab.report.forecast_columns import BREAK_EVEN, CHECKS
from shardlab.report.message_columns import CODECS, TRAFFIC
from shardlab.report.numbers import ABSENT, figure
from shardlab.report.timing_columns import SCALING, TIMED

MANY = 4
"""distinct values up to this number are listed one by one"""


@dataclass(frozen=True)
class Table:
    """A table of text cells."""

    title: str
    columns: list[Column]
    rows: list[list[str]]
    highlighted: Sequence[int] = ()
    """rows of the baseline"""

    def markdown(self) -> str:
        """A GitHub table; text cells are escaped."""
        headings, *rows = (
            [escape(cell) for cell in line]
            for line in ([column.heading for column in self.columns], *self.rows)
        )
        ruler = ["---:" if column.numeric else "---" for column in self.columns]
        return "".join(f"| {' | '.join(line)} |\n" for line in (headings, ruler, *rows))


def escape(text: str) -> str:
    """Text that shows as itself in a Markdown table: no markup, no HTML, one line."""
    return re.sub(r"([\\`*_\[\]<>|~&])", r"\\\1", " ".join(text.split()))


def text_table(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    """A table of words."""
    columns = [Column(heading, "", lambda row: "", "", numeric=False) for heading in headings]
    return Table(title, columns, rows)


def run_tables(compared: pd.DataFrame, records: list[Record], baseline: str) -> dict[str, Table]:
    """The tables with a row per run, from `aggregate.comparison` of the records."""
    rows = compared.reset_index()
    return {
        key: run_table(title, columns, rows, baseline)
        for key, title, columns in (
            ("headline", "Headline", HEADLINE),
            ("comparison", "Comparison", COMPARISON),
            ("breakdown", "Where the time goes", BREAKDOWN),
            ("traffic", "What moves", TRAFFIC),
            ("codecs", "What the codecs do", CODECS),
            ("efficiency", "Memory, processor and link", EFFICIENCY),
            ("reached", "How soon how good", reached_columns(records)),
        )
        if columns
    }


def run_table(title: str, columns: list[Column], table: pd.DataFrame, baseline: str) -> Table:
    """A row for each of `table`, which has a column `run`; those of the baseline stand out."""
    rows: list[dict[str, Any]] = [
        {**row, "is_baseline": row["run"] == baseline} for row in table.to_dict("records")
    ]
    highlighted = [number for number, row in enumerate(rows) if row["is_baseline"]]
    return Table(title, columns, [[c.cell(row) for c in columns] for row in rows], highlighted)


def definitions(records: list[Record]) -> Table:
    """Every column with its meaning, once."""
    of_runs = [*COMPARISON, *BREAKDOWN, *TRAFFIC, *CODECS, *EFFICIENCY, *reached_columns(records)]
    seen: dict[str, list[str]] = {}
    for column in [*of_runs, *SCALING, *TIMED, *CHECKS, *BREAK_EVEN]:
        seen.setdefault(column.heading, [column.heading, column.meaning])
    return text_table("How each figure is defined", ["figure", "meaning"], [*seen.values()])


def seed_warning(records: list[Record]) -> str | None:
    """The sentence that goes with every table of too few seeds."""
    count = len({record.seed for record in records})
    if count >= ENOUGH_SEEDS:
        return None
    intervals = "there is no interval" if count == 1 else "intervals are very wide"
    return (
        f"Fewer than {ENOUGH_SEEDS} seeds ({count}): {intervals}; "
        "read differences as single observations."
    )


def distinct(values: Iterable[Any]) -> str:
    """Different values, in the order in which they come."""
    texts = list(dict.fromkeys(str(value) for value in values))
    if len(texts) <= MANY:
        return ", ".join(texts)
    return f"{', '.join(texts[:MANY])} and {len(texts) - MANY} more"


def environment(records: list[Record]) -> list[tuple[str, str]]:
    """What the figures were measured on; several values stand where the records differ."""

    def of(name: str) -> str:
        return distinct(getattr(record, name) for record in records)

    def host(name: str, scale: str = "") -> str:
        return distinct(
            f"{record.host[name] / 2**30:.1f} GiB" if scale else record.host[name]
            for record in records
        )

    return [
        ("processor", host("cpu")),
        ("cores", host("cores")),
        ("memory", host("memory_bytes", "GiB")),
        ("kernel", host("kernel")),
        ("Python", host("python")),
        ("torch", of("torch")),
        ("ranks", of("world_size")),
        ("link", of("link")),
        ("model", distinct(f"{r.model} ({r.parameters:,} parameters)" for r in records)),
        ("data", of("dataset")),
        ("steps", of("steps")),
        (
            "tokens per step",
            distinct(
                f"{r.world_size * r.batch_size * r.accumulation * r.sequence_length:,}"
                for r in records
            ),
        ),
        ("sequence length", of("sequence_length")),
        ("seeds", ", ".join(map(str, dict.fromkeys(r.seed for r in records)))),
        ("revision", of("revision")),
    ]


def hashes(records: list[Record]) -> Table:
    """What identifies each run: the hashes of its strategy and of the parameters that made it."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.run, []).append(record)
    rows = [
        [run, distinct(r.strategy_hash for r in those), distinct(r.params_hash for r in those)]
        for run, those in runs.items()
    ]
    return text_table("Hashes", ["run", "strategy", "parameters"], rows)


def facts(tree: dict[str, Any], path: str = "") -> list[tuple[str, str]]:
    """A tree of plain values as lines of name and value."""
    lines: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = " · ".join(filter(None, [path, key.replace("_", " ")]))
        if isinstance(value, dict):
            lines += facts(value, name)
        elif isinstance(value, list):
            lines.append((name, ", ".join(map(_fact, value)) or ABSENT))
        else:
            lines.append((name, _fact(value)))
    return lines


def _fact(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else figure(value, 4)


def setting_line(records: list[Record]) -> str:
    """One line: host, seeds, steps, model, data, versions."""
    facts = dict(environment(records))
    parts = [
        f"{facts['processor']} ({facts['cores']} cores, {facts['ranks']} ranks)",
        f"seed {facts['seeds']}" if facts["seeds"].isdigit() else f"seeds {facts['seeds']}",
        f"{facts['steps']} steps of {facts['tokens per step']} tokens",
        facts["model"],
        facts["data"],
        f"torch {facts['torch']}",
        f"revision {facts['revision']}",
    ]
    line = "Measured on " + "; ".join(parts) + "; ± is the standard deviation over seeds; in "
    line += "brackets the 95 % interval of the paired comparison with the baseline."
    return line


def headline_markdown(table: Table, records: list[Record]) -> str:
    """The headline table with its setting in one line under it."""
    line = " ".join(filter(None, [setting_line(records), seed_warning(records)]))
    return f"{table.markdown()}\n{escape(line)}\n"
