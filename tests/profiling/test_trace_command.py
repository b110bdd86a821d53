"""Traces of anybody: found in folders, concluded in a sentence, and shown as a page."""

import csv
import gzip
import json
import shutil
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.core.errors import UserError
from shardlab.profiling.job import break_down
from shardlab.profiling.table import conclude, page
from tests.profiling.nccl_trace_factory import MadeTrace
from tests.trace_factory import event, label, write_rank


def job_of(tmp_path, *collectives, compute=730, name="{}"):
    """A rank whose step of 1000 us computes first."""
    trace = MadeTrace().label("ProfilerStep#1", 0, 1000)
    trace.kernel(0, compute, launched=0)
    for start, end, collective in collectives:
        trace.nccl(start, end, 0, "Generic", reported=name.format(collective))
    trace.kernel(999, 1000, launched=0)
    return break_down([trace.write(tmp_path / "0.json")])


@pytest.mark.parametrize(
    "collectives, sentence",
    [
        (
            [(600, 930, "all_gather"), (930, 999, "reduce_scatter")],
            "27 % of the step is exposed communication, mostly all_gather; "
            "hiding it all gives at most 1.37 \N{MULTIPLICATION SIGN}",
        ),
        (
            [(730, 820, "a"), (820, 910, "b"), (910, 999, "c")],
            "27 % of the step is exposed communication, mostly a and b; "
            "hiding it all gives at most 1.37 \N{MULTIPLICATION SIGN}",
        ),
        (
            [(100, 600, "all_reduce")],
            "Communication is hidden: 50 % of the step, none of it exposed.",
        ),
        ([], "There is no communication in these traces."),
    ],
)
def test_the_conclusion_names_share_operation_and_bound(tmp_path, collectives, sentence):
    assert conclude(job_of(tmp_path, *collectives)) == sentence


def test_the_page_escapes_what_a_trace_says(tmp_path):
    shown = page(job_of(tmp_path, (730, 999, "x"), name="<script>{}"))
    assert "<script" not in shown
    assert "&lt;script&gt;x" in shown and "<h1>27 % of the step is exposed" in shown


def traced(folder, rank=0, late=0):
    events = [label("ProfilerStep#1", late, 1000 + late), event("aten::mm", late, 500 + late)]
    folder.mkdir(parents=True, exist_ok=True)
    return write_rank(folder / f"{rank}.json", events, rank)


def test_folders_are_searched_for_traces(tmp_path):
    packed = tmp_path / "job/sub/1.pt.trace.json.gz"
    first, second = traced(tmp_path / "job/sub"), traced(tmp_path / "other", 1)
    packed.write_bytes(gzip.compress(second.read_bytes()))
    for name, content in {"metrics.json": {"a": 1}, "corpus.json": [{"text": '"ph": 1'}]}.items():
        (tmp_path / "job" / name).write_text(json.dumps(content))
    assert break_down([tmp_path / "job"]) == break_down([first, packed])


def test_folders_without_traces_or_with_several_jobs_are_refused(tmp_path):
    traces = traced(tmp_path / "one"), traced(tmp_path / "two", late=1)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"none: no trace of torch.profiler .* in it: write one"):
        break_down([tmp_path / "none"])
    for paths in ([tmp_path], traces):
        with pytest.raises(UserError, match=r"two/0.json: rank 0 is also in .*one/0.json, and"):
            break_down(paths)
    for path in traces:
        trace = json.loads(path.read_text())
        path.write_text(json.dumps({**trace, "distributedInfo": {}}))
    with pytest.raises(UserError, match=r"two/0.json: does not say its rank, like .*one/0.json"):
        break_down([tmp_path])
    # who names files means them
    assert len(break_down(traces).steps) == 2


def test_a_damaged_trace_in_a_folder_is_refused(tmp_path):
    packed = tmp_path / "0.json.gz"
    packed.write_bytes(gzip.compress(traced(tmp_path / "one").read_bytes())[:-9])
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(UserError, match=r"0\.json\.gz: incomplete trace"):
        break_down([tmp_path])


def test_nothing_is_read_or_written_but_what_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    traced(tmp_path)
    for arguments in (["0.json"], ["--csv", "rows.csv", "--html", "page.html", "."]):
        main(["trace", *arguments])
        *shown, last = capsys.readouterr().out.splitlines()
        assert any("50.0" in line for line in shown)
        assert any("update: unknown" in line for line in shown)
        assert last == "There is no communication in these traces."
    with Path("rows.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["compute_ms"], row["forward_ms"]) == ("0.5", "")
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "rows.csv", "page.html"}
