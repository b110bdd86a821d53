import base64
import hashlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.figure
import pandas as pd
import pytest

from shardlab.core.files import read_json, read_json_lines
from shardlab.report.plots import BASELINE_COLOUR, line_styles
from shardlab.report.tables import (
    ONE_DEVICE,
    RUN,
    Column,
    Figure,
    Section,
    figures_of,
    make_table,
    tables_of,
)
from shardlab.report.write import SECTIONS, report_sections, write_report
from shardlab.results.timing_result import NO_COMMUNICATION
from shardlab.strategy.document import parse_strategy
from tests.evidence_factory import make_evidence, make_forecast
from tests.record_factory import STRATEGIES, make_history, make_record, make_records
from tests.timed_run_factory import make_timed

EVIL = "<script>alert('$1$')</script>"
FILES = {
    "report.html",
    "tables.md",
    "headline.md",
    "comparison.csv",
    "comparison.jsonl",
    "loss.csv",
    "quality.jsonl",
    "summary.json",
    "timings.csv",
}


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = set(), [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def _hashes(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(make_evidence(make_records()), folder)
    return folder


def test_report_writes_exactly_the_expected_files(report):
    sections = report_sections(make_evidence(make_records()))
    names = ["crossover", *(figure.name for figure in figures_of(sections))]
    plots = {f"plots/{kind}/{name}.{kind}" for name in names for kind in ("svg", "png")}
    assert set(_hashes(report)) == FILES | plots
    assert pd.read_csv(report / "comparison.csv")["run"].tolist() == list(STRATEGIES)
    rows = read_json_lines(report / "comparison.jsonl")
    assert [row["run"] for row in rows] == list(STRATEGIES)
    assert pd.read_csv(report / "loss.csv")["run"].unique().tolist() == list(STRATEGIES)
    summary = read_json(report / "summary.json")
    assert list(summary["runs"]) == sorted(STRATEGIES)
    assert all(isinstance(n, float) for run in summary["runs"].values() for n in run.values())
    measured = {"gradients_ratio", "ppl_ratio", "ppl_ratio_low", "ppl_ratio_high"}
    assert all(measured <= {*run} for run in summary["runs"].values())
    group = make_evidence(make_records()).main_group
    for timing, steps in summary["step_ms"].items():
        rows = group[group["timing"] == timing]
        assert steps == pytest.approx(dict(zip(rows["run"], rows["step_ms"], strict=True)))
    assert len(summary["step_ms"]) == group["timing"].nunique() > 1
    assert summary["agent"]["rounds"] == 2


def test_page_loads_no_external_resources(report):
    text = (report / "report.html").read_text()
    page = _Page(text)
    linked = ("src", "href", "xlink:href")
    loaded = [value for name, value in page.attributes if name in linked]
    assert all(value.startswith(("#", "data:")) for value in loaded)
    assert text.count("<svg") == text.count("<figure>") == len([*report.glob("plots/svg/*")])
    assert "@import" not in text and "url(" not in text.replace("url(#", "")
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    pointed = {value[1:] for value in loaded if value.startswith("#")}
    assert pointed | set(re.findall(r"url\(#(.*?)\)", text)) <= set(ids)


def test_the_page_allows_its_own_script_alone(report):
    text = (report / "report.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and "default-src 'none'" in text
    assert not re.search(r"\son\w+=", text.replace(script, ""))


def test_a_run_can_be_hidden_in_all_plots_and_headings_define_their_columns(report):
    attributes = _Page((report / "report.html").read_text()).attributes
    hidden, names = ({v for n, v in attributes if n == f"data-{key}"} for key in ("run", "legend"))
    assert {*STRATEGIES, ONE_DEVICE} <= hidden <= names
    titles = {value for name, value in attributes if name == "title"}
    defined = tables_of(report_sections(make_evidence(make_records())))
    assert titles == {column.meaning for table in defined for column in table.columns} - {""}


def test_empty_parts_are_hidden(undrawn, tmp_path):
    runs = ["fsdp2", "ddp"]
    timed = [make_timed("two-ranks", run) for run in [*runs, NO_COMMUNICATION]]
    predicted = make_forecast(runs, checks=[], summary=None)
    evidence = make_evidence(make_records(runs), timed=timed, predicted=predicted)
    write_report(evidence, tmp_path)
    for name in ("report.html", "tables.md"):
        text = (tmp_path / name).read_text()
        assert "No timing" not in text and "Scaling" not in text
        assert "Which codec" not in text and "Validation on held-out" not in text
    assert (tmp_path / "plots/svg/scaling.svg").exists()


def test_untrusted_texts_are_escaped(without_png, tmp_path):
    strategy = parse_strategy({"gradients": {"codec": "int8", "exclude": [EVIL]}})
    changes = {
        "strategy": strategy.canonical().model_dump(mode="json"),
        "strategy_hash": strategy.hash(),
        "comm_ms_by_op": {EVIL: 1.0},
    }
    records = [make_record(run, seed, **changes) for run in (EVIL, "fsdp2") for seed in range(3)]
    for record in records:
        record.ledger["gradients"]["uncompressed"] = {EVIL: 1.0}
    evidence = make_evidence(
        records,
        history=make_history(records, reason=EVIL),
        source={"name": EVIL, "licence": EVIL, EVIL: 1},
    )
    write_report(evidence, tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = _Page(text)
    assert text.count("<script") == text.count("</script>") == 1
    assert page.text.count(EVIL) >= 11
    for name in ("headline.md", "tables.md"):
        assert "\\<script\\>" in (tmp_path / name).read_text()
        assert "<script>" not in (tmp_path / name).read_text()


@pytest.mark.long
def test_report_is_deterministic(report, tmp_path):
    """Another process with another hash seed, so that no order of a set or clock can hide."""
    code = (
        "import sys; from pathlib import Path; "
        "from tests.evidence_factory import *; from tests.record_factory import *; "
        "from shardlab.report.write import write_report; "
        "write_report(make_evidence(make_records()), Path(sys.argv[1]))"
    )
    path = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path, "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    assert _hashes(tmp_path) == _hashes(report)


def test_few_seeds_cause_a_warning_with_every_table(undrawn, tmp_path):
    evidence = make_evidence(make_records(["ddp-int8", "fsdp2"], 2))
    write_report(evidence, tmp_path)
    warning = "Fewer than 3 seeds (2)"
    tables = [table for table in tables_of(report_sections(evidence)) if table.warning]
    assert tables
    # with every table of runs, and below the answer
    assert (tmp_path / "report.html").read_text().count(warning) == len(tables) + 1
    assert (tmp_path / "tables.md").read_text().count(warning) == len(tables)
    assert warning in (tmp_path / "headline.md").read_text()


def test_added_section_is_on_the_page_and_in_markdown(undrawn, tmp_path):
    evidence = make_evidence(make_records(["ddp", "fsdp2"]))
    column = Column("sprockets", "1/step", "step_ms_mean", "a meaning of the column")
    drawing = matplotlib.figure.Figure()
    drawing.subplots()
    section = Section(
        "Added section",
        sentences=["A sentence about <sprockets>."],
        items=["An item of a list."],
        figures=[Figure("sprockets", "A caption.", drawing)],
        tables=[evidence.run_table("Sprockets by run", [RUN, column])],
        notes=["A note on sprockets."],
        sections=[
            Section("Below", tables=[make_table("Inner", ["a"], [["inner cell"]])]),
            Section("Folded", sentences=["A folded sentence."], folded=True),
        ],
    )
    write_report(evidence, tmp_path, [*SECTIONS, lambda _: section])
    page = _Page((tmp_path / "report.html").read_text())
    assert ("href", "#added-section") in page.attributes
    markdown = (tmp_path / "tables.md").read_text().replace("\\", "")
    texts = [*section.sentences, *section.items, *section.notes, "A caption.", "Sprockets by run"]
    for part in (*texts, "inner cell", "A folded sentence.", "a meaning of the column"):
        assert part in page.text and part in markdown, part
    assert {path.suffix for path in tmp_path.glob("plots/*/sprockets.*")} == {".svg", ".png"}


def test_every_table_and_figure_is_on_the_page_and_in_markdown(report):
    sections = report_sections(make_evidence(make_records()))
    page, markdown = (report / "report.html").read_text(), (report / "tables.md").read_text()
    for table in filter(lambda table: table.rows, tables_of(sections)):
        assert f'aria-label="{table.title}"' in page and table.markdown() in markdown
    for figure in figures_of(sections):
        assert figure.caption in _Page(page).text and f"plots/svg/{figure.name}.svg" in markdown
    assert all(run in page for run in STRATEGIES)


def test_baseline_alone_can_be_reported(without_png, tmp_path):
    write_report(make_evidence(make_records(["fsdp2"])), tmp_path)
    assert set(_hashes(tmp_path)) >= FILES


def test_every_run_has_a_colour_and_the_baseline_is_black():
    colours = {run: style["color"] for run, style in line_styles("abc", "b").items()}
    assert len({colours[run] for run in "abc"}) == 3
    assert colours["b"] == BASELINE_COLOUR
