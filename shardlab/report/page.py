"""The HTML page: one file that needs nothing else, from a template that escapes every text."""

import io
import re
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from shardlab.agent.records.history import History
from shardlab.records.run import Record
from shardlab.report.answer import answer
from shardlab.report.columns import NOTE
from shardlab.report.forecast_room import ForecastRoom
from shardlab.report.plots import save
from shardlab.report.scaling import bottleneck_of
from shardlab.report.search import outcome, stories
from shardlab.report.tables import (
    Table,
    definitions,
    environment,
    facts,
    hashes,
    seed_warning,
    setting_line,
)
from shardlab.report.timing_room import TimingRoom

CAPTIONS = {
    "loss": "Training loss, mean over seeds with a band of one standard deviation; below, its "
    "difference to the baseline at the same step.",
    "step_time": "Wall time of a step without profiling. The line marks the baseline.",
    "bytes_quality": "What fewer bytes cost in quality. Marker shapes stand for engines; the line "
    "marks the baseline.",
    "breakdown": "Compute, exposed communication, exposed copies and idle time sum to the profiled "
    "step.",
    "scaling": "Throughput of all ranks together, and the share of backward in which a collective "
    "ran. The dotted line is the bound: every rank trains the whole model by itself.",
    "crossover": "Speed-up over the baseline at the same rate, with its 95 % interval by rounds. "
    "The dotted line is the bound: steps without communication.",
    "forecast": "By the model, with the 95 % interval of its fits: throughput of a rank against "
    "one that does not communicate, every rank computing as here. Above 100 %: with shards a rank "
    "updates only its part of the parameters.",
}


def render(
    compared: pd.DataFrame,
    tables: dict[str, Table],
    figures: dict[str, Figure],
    room: TimingRoom,
    predicted: ForecastRoom,
    records: list[Record],
    history: History,
    baseline: str,
    source: dict[str, Any],
    statistics: dict[str, Any],
) -> str:
    """The whole page.

    Args:
        compared: `aggregate.comparison`.
        tables: `tables.run_tables`.
        figures: all, by name.
        source, statistics: what the data stages say of the corpus; shown as they are.
    """
    return _template().render(
        title="Sharding and compression strategies compared",
        answer=[
            *answer(compared, baseline, history),
            bottleneck_of(room.timed, next(r for r in records if r.run == baseline)),
        ],
        warning=seed_warning(records),
        tables=tables,
        setting=setting_line(records),
        plots={
            name: {"svg": _inline(figure, name), "caption": CAPTIONS[name]}
            for name, figure in figures.items()
        },
        room=room,
        predicted=predicted,
        note=NOTE,
        outcome=outcome(history),
        rounds=stories(history),
        source=facts(source),
        statistics=facts(statistics),
        definitions=definitions(records),
        environment=environment(records),
        hashes=hashes(records),
    )


def _template() -> Template:
    made = Environment(
        loader=PackageLoader("shardlab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return made.get_template("report.html.j2")


def _inline(figure: Figure, name: str) -> Markup:
    """The figure as an SVG element; its identifiers get a prefix, unique on the page.

    Matplotlib escapes the texts that it writes into an SVG, so this alone is passed unescaped.
    """
    buffer = io.StringIO()
    save(figure, buffer, "svg")
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{CAPTIONS[name]}"', 1))
