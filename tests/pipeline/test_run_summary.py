"""What ran is summed up at the end of a command, from the logs of the stages."""

import json
import os
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from stages.summary import summarize
from tests.pipeline.workspace import copy_project, run, set_params


def entry(text: str, later: float) -> str:
    """An entry of a log, `later` seconds after this process was started."""
    at = datetime.fromtimestamp(psutil.Process().create_time()) + timedelta(seconds=later)
    return f"{at.isoformat(timespec='seconds')} {text}\n"


def test_only_what_ran_since_the_tool_was_started_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert summarize(os.getpid()) == ""
    done = entry("done in 0.5 s", -60), entry("fsdp2: done in time", 1), entry("done in 2.25 s", 2)
    logs = {
        "prepare": done[0],
        "train/fsdp2/0": "".join(done),
        "train/fsdp2/1": entry("done in 1.0 s", 3),
        "profile/fsdp2/0": entry("done in 4.0 s", 4),
        "benchmarks/nothing": "no entry\n",
    }
    for name, text in logs.items():
        path = tmp_path / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rows = [line.split() for line in summarize(os.getpid()).splitlines()]
    assert rows[1:] == [["profile", "1", "4.0"], ["train", "2", "3.2"], ["all", "3", "7.2"]]


@pytest.mark.long
def test_snakemake_sums_up_what_it_ran(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    (root / "mine.json").write_text(json.dumps([{"id": "1", "title": "t", "text": 5}]))
    command = ("snakemake", "--cores", "1", "--", "data/corpus.json")
    first = run(root, *command).stdout
    assert "\n1 job\n" in first  # said before it began
    assert [line.split()[:2] for line in table(first)] == [["prepare", "1"], ["all", "1"]]
    set_params(root, data={"source": "json", "path": "mine.json"}, inputs={"mine": "mine.json"})
    assert "[1/1] prepare: 300 documents, " in first and "Select jobs" not in first
    failed = run(root, *command, check=False).stdout
    assert "failed: prepare, 00:" in failed and "; log: logs/prepare.log\n" in failed
    assert failed.count("prepare: error: mine.json: ") == 1 and table(failed) == []


def table(said: str) -> list[str]:
    """Lines of the summary between its header and its end."""
    after = said.partition("stage       jobs   seconds\n")[2]
    return after.partition("\n\n")[0].splitlines()
