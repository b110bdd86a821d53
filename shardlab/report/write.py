"""Files of the report: the page, tables.md, plots, CSV and JSON.

To add a section: write a module in `sections` with a function from evidence to a section, add it to
`SECTIONS`, and test it. Its tables are then on the page and in tables.md, its figures on the page
and in plots/, and the meanings of its columns in the section Definitions.
"""

import math
import re
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from shardlab.core.files import atomic, write_json, write_json_lines, write_text
from shardlab.report.aggregate import loss_curves, seed_warning
from shardlab.report.answer import Answer, answer
from shardlab.report.evidence import Builder, Evidence
from shardlab.report.markdown import escape
from shardlab.report.plots import save
from shardlab.report.sections import appendix, runs
from shardlab.report.sections.forecast import forecast
from shardlab.report.sections.links import all_timings, crossover, links, time_to_quality
from shardlab.report.sections.scaling import scaling
from shardlab.report.sections.search import search
from shardlab.report.sections.time_to_loss import time_to_loss, use_table
from shardlab.report.tables import Section, figures_of, tables_of

SECTIONS: tuple[Builder, ...] = (
    time_to_loss,
    runs.comparison,
    scaling,
    links,
    runs.quality,
    time_to_quality,
    search,
    forecast,
    all_timings,
    runs.breakdown,
    runs.traffic,
    runs.codec_statistics,
    runs.efficiency,
    appendix.data,
    appendix.environment,
)
"""in the order of the page"""

_COLOURS = {"#000000": "currentColor", "#ffffff": "var(--page)", "#e3e3e3": "var(--line)"}
"""of plots, with those of the page: text and baseline, background, grid"""
_TITLE = "Sharding and communication compression compared"
_SUMMARY = [
    "step_ms",
    "step_ratio",
    "step_ratio_low",
    "step_ratio_high",
    "tokens_per_s",
    "bytes_wire",
    "compression_ratio",
    "gradients_ratio",
    "ppl_ratio",
    "ppl_ratio_low",
    "ppl_ratio_high",
    "val_ppl",
    "val_bits_per_byte",
]


def report_sections(evidence: Evidence, builders: Sequence[Builder] = SECTIONS) -> list[Section]:
    """Return all sections; the last one defines the columns of the others."""
    sections = [section for build in builders if (section := build(evidence)) is not None]
    return [*sections, appendix.definitions(tables_of(sections))]


def write_report(evidence: Evidence, folder: Path, builders: Sequence[Builder] = SECTIONS) -> None:
    """Write the page, tables.md, headline.md, summary.json, plots/, and figures as CSV and JSON.

    Equal evidence gives equal files, byte for byte.
    """
    sections, found = report_sections(evidence, builders), answer(evidence)
    for figure in (crossover(evidence), *figures_of(sections)):
        for kind in ("svg", "png"):
            with atomic(folder / "plots" / kind / f"{figure.name}.{kind}") as temporary:
                save(figure.drawing, temporary, kind)
    _write_csv(evidence.compared.reset_index(), folder / "comparison.csv")
    _write_csv(loss_curves(evidence.losses), folder / "loss.csv")
    _write_csv(evidence.all_timing_rows, folder / "timings.csv")
    write_json_lines(folder / "comparison.jsonl", comparison_rows(evidence.compared))
    write_json_lines(folder / "quality.jsonl", evidence.quality_rows)
    write_json(folder / "summary.json", summary(evidence))
    write_text(folder / "headline.md", headline_markdown(evidence, found))
    parts = [f"# {_TITLE}", _answer_markdown(found), *(s.markdown() for s in sections)]
    write_text(folder / "tables.md", "\n\n".join(parts) + "\n")
    write_text(folder / "report.html", _page(evidence, found, sections, folder / "plots/svg"))


def headline_markdown(evidence: Evidence, found: Answer) -> str:
    """Return the answer, what to use by the time to one loss or else the comparison without its
    folded columns, and its setting in one line."""
    table = runs.comparison_table(evidence, extra=False)
    if evidence.tuned is not None and evidence.by_loss:
        table = use_table(evidence.by_loss, evidence.tuned)
    note = f"{table.note}." if table.note else ""
    parts = [appendix.setting_line(evidence), seed_warning(evidence.records), note]
    line = " ".join(filter(None, parts))
    return f"{_answer_markdown(found)}\n\n{table.markdown()}\n{escape(line)}\n"


def summary(evidence: Evidence) -> dict[str, Any]:
    """Return the numbers to compare between experiments: per run, null where not finite, and per
    timing of the comparison the milliseconds of a step of each run that it has."""
    history, group = evidence.history, evidence.main_group
    return {
        "runs": {
            str(run): {name: _number(row[name]) for name in _SUMMARY}
            for run, row in evidence.compared.iterrows()
        },
        "step_ms": {
            str(timing): {
                run: _number(ms) for run, ms in zip(rows["run"], rows["step_ms"], strict=True)
            }
            for timing, rows in group.groupby("timing", sort=False)
        },
        "agent": {
            "strategy": history.incumbent_results.strategy.label(),
            "hash": history.incumbent_results.hash,
            "source": history.incumbent_results.source,
            "rounds": len(history.rounds),
        },
    }


def comparison_rows(compared: pd.DataFrame) -> list[dict[str, Any]]:
    """Return `aggregate.comparison` as JSON values, one mapping per run."""
    return [
        {str(k): _number(v) if isinstance(v, float) else v for k, v in row.items()}
        for row in compared.reset_index().to_dict("records")
    ]


def _number(value: float) -> float | None:
    # ten significant digits: those beyond differ between processors, not between runs
    return float(f"{value:.10g}") if math.isfinite(value) else None


def _write_csv(table: pd.DataFrame, path: Path) -> None:
    with atomic(path) as temporary:
        table.to_csv(temporary, index=False, float_format="%.10g", lineterminator="\n")


def _answer_markdown(found: Answer) -> str:
    lines = [f"- {escape(line)}" for line in (*found.lines, *found.reasons)]
    return "\n\n".join([*map(escape, found.warnings), "\n".join(lines)])


def _page(evidence: Evidence, found: Answer, sections: Sequence[Section], plots: Path) -> str:
    """Return the page, which needs no other file; the template escapes every text."""
    templates = PackageLoader("shardlab.report")
    environment = Environment(
        loader=templates,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["inline"] = partial(_inline, plots)
    script, _, _ = templates.get_source(environment, "report.js")
    return environment.get_template("report.html.j2").render(
        title=_TITLE,
        answer=found,
        chart=crossover(evidence),
        warning=seed_warning(evidence.records),
        sections=sections,
        script=script,
        # no other script runs, whatever a text of a model or a corpus holds
        digest=b64encode(sha256(script.encode()).digest()).decode(),
    )


def _inline(plots: Path, name: str) -> str:
    """Return a plot, whose texts matplotlib escapes, as an element that takes the page's colours.

    Identifiers begin with `name`, since all plots share the page. Artists of a run, `run:NAME`, and
    its name in the legend, `legend:NAME`, have data attributes instead: the page can hide a run.
    """
    svg = (plots / f"{name}.svg").read_text(encoding="utf-8")
    svg = svg[max(svg.find("<svg"), 0) :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="(run|legend):', r' data-\1="', svg)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", svg)
    for colour, themed in _COLOURS.items():
        svg = svg.replace(colour, themed)
    return svg
