"""What a stage says is on stderr and in its log."""

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
