"""Sections of the report, in the order of the page.

To add one: write a module in `sections` with a function from evidence to a section, add it to
`SECTIONS`, and test it. Its tables are then on the page and in tables.md, its figures on the page
and in plots/, and the meanings of its columns in the section Definitions.
"""

from collections.abc import Callable, Sequence

from shardlab.report.evidence import Evidence
from shardlab.report.section import Section, tables_of
from shardlab.report.sections.appendix import data, definitions, environment, regenerate
from shardlab.report.sections.efficiency import efficiency, time_to_quality
from shardlab.report.sections.forecast import forecast
from shardlab.report.sections.links import links
from shardlab.report.sections.messages import codec_statistics, traffic
from shardlab.report.sections.runs import breakdown, comparison, headline, plots
from shardlab.report.sections.scaling import scaling
from shardlab.report.sections.search import search

Builder = Callable[[Evidence], Section | None]
"""returns None where the evidence has nothing for the section"""

SECTIONS: tuple[Builder, ...] = (
    headline,
    plots,
    comparison,
    breakdown,
    traffic,
    codec_statistics,
    efficiency,
    time_to_quality,
    scaling,
    links,
    forecast,
    search,
    data,
    environment,
    regenerate,
)


def report_sections(evidence: Evidence, builders: Sequence[Builder] = SECTIONS) -> list[Section]:
    """Return all sections; the last one defines the columns of the others."""
    sections = [section for build in builders if (section := build(evidence)) is not None]
    return [*sections, definitions(tables_of(sections))]
