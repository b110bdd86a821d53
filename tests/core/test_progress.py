"""Messages of a stage on stderr and in its log, and the contents of its bar."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.core import progress


def test_what_is_said_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_log_path", None)
    progress.say("before")
    path = tmp_path / "logs/train/fsdp2.log"
    progress.log_to(path)
    progress.say("step 1")
    progress.log("done\n")
    assert capsys.readouterr().err == "before\nstep 1\n"
    assert [line.partition(" ")[2] for line in path.read_text().splitlines()] == ["step 1", "done"]


def test_nothing_is_kept_twice_where_stderr_leads_into_the_log(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    program = (
        "import sys; from pathlib import Path; from shardlab.core import progress\n"
        "progress.log_to(Path(sys.argv[1])); progress.say('step 1')"
    )
    with log.open("a") as stderr:
        subprocess.run([sys.executable, "-c", program, log], stderr=stderr, check=True)
    assert [line.partition(" ")[2] for line in log.read_text().splitlines()] == ["step 1"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_the_memory_whenever_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert sum(progress.track(range(10_000), "train", unit="step")) == 49_995_000
    drawn = terminal.getvalue().split("\r")
    assert len(drawn) < 100, "not in each step"
    assert re.search(r"^train: +0%.* [0-9]+\.[0-9]{2} GB\]", drawn[1])


def test_there_is_no_bar_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*progress.track(range(3), "train")] == [0, 1, 2]
    assert capsys.readouterr().err == ""
