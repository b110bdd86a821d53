"""Start of a stage: its imports, and the end of who starts it."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.pipeline.workspace import ROOT, Marked, run, wait_for

HEAVY = {"matplotlib", "pandas", "scipy.optimize", "scipy.stats", "torch", "transformers"}
NEEDS = {
    "prepare": set(),
    "tokenize": set(),
    "profile": set(),
    "trace": set(),
    "collect": {"pandas"},
    "decide": set(),
}


@pytest.mark.parametrize("stage", NEEDS)
def test_a_stage_without_models_loads_nothing_large_but_what_it_needs(stage: str) -> None:
    script = f"import sys, stages.{stage}; print(*sys.modules.keys() & {HEAVY})"
    assert {*run(ROOT, "python", "-c", script).stdout.split()} == NEEDS[stage]


IMPORTS = """
import time
open("imports", "w").close()
time.sleep(2)
open("ran", "w").close()
"""


def project_of(folder: Path, stage: str) -> None:
    """A project with one stage, whose imports take their time."""
    (folder / "stages").mkdir()
    (folder / "shardlab").symlink_to(ROOT / "shardlab")
    shutil.copy2(ROOT / "stages/__init__.py", folder / "stages")
    (folder / f"stages/{stage}.py").write_text(IMPORTS)


@pytest.mark.long
@pytest.mark.parametrize("tool", ["sh", "dvc"])
def test_a_stage_ends_with_its_killed_tool_amid_imports(tmp_path: Path, tool: str) -> None:
    project_of(tmp_path, "report")
    command = ["sh", "-c", "SHARDLAB_LOCK=1 python -m shardlab report; true"]
    if tool == "dvc":
        stage = "stages: {report: {cmd: exec python -m shardlab report, deps: [stages]}}"
        (tmp_path / "dvc.yaml").write_text(stage)
        run(tmp_path, "dvc", "init", "--quiet", "--no-scm")
        command = ["dvc", "repro"]
    # who runs the tests in the background may ignore some signals, and children inherit that
    marked = Marked(tmp_path, "env", "--default-signal", *command)
    try:
        wait_for((tmp_path / "imports").exists, 60, "a stage")
        marked.process.kill()
        wait_for(lambda: not marked.family(), 15, "no process left")
    finally:
        marked.close()
    assert not (tmp_path / "ran").exists()


def test_ctrl_c_amid_imports_is_no_traceback(tmp_path: Path) -> None:
    project_of(tmp_path, "report")
    marked = Marked(tmp_path, "env", "--default-signal", "python", "-m", "shardlab", "report")
    try:
        wait_for((tmp_path / "imports").exists, 60, "a stage")
        marked.process.send_signal(signal.SIGINT)
        assert marked.process.wait(15) == 128 + signal.SIGINT
    finally:
        marked.close()
    assert (tmp_path / "marked.log").read_text() == ""
