"""Start of a stage: imports, garbage collection, and the end of who starts it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.workspace import ROOT, Marked, run, wait_for

LIGHT = ["prepare", "tokenize", "profile", "collect", "decide", "readme"]
HEAVY = ["matplotlib", "pandas", "scipy.optimize", "scipy.stats", "torch", "transformers"]

PROBE = """
import gc
from stages.common import run

on_import = gc.isenabled()

def main(params):
    print(on_import, gc.isenabled(), gc.get_freeze_count() > 0)

if __name__ == "__main__":
    run(main)
"""


def said(*arguments: str, folder: Path = ROOT) -> list[str]:
    """The words that Python prints, the library being this one."""
    command = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()


def test_stages_without_models_load_nothing_large() -> None:
    script = "import sys; from importlib import import_module\n"
    script += f"for stage in {LIGHT}:\n    import_module(f'stages.{{stage}}')\n"
    script += f"    for name in sys.modules.keys() & set({HEAVY}): print(f'{{stage}}:{{name}}')"
    assert said("-c", script) == []


def test_garbage_is_collected_from_the_work_on_but_not_among_imports(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "stages", tmp_path / "stages")
    shutil.copy2(ROOT / "params/quick.yaml", tmp_path / "params.yaml")
    (tmp_path / "stages/probe.py").write_text(PROBE)
    assert said("-m", "stages.probe", folder=tmp_path) == ["False", "True", "True"]


def test_import_of_a_stage_keeps_garbage_collection() -> None:
    assert said("-c", "import gc, stages.readme; print(gc.isenabled())") == ["True"]


IMPORTS = """
import os, time
open("imports", "w").close()
time.sleep(2)
__name__ == "__main__" and open("ran", "w").close()
"""


@pytest.mark.long
@pytest.mark.parametrize("tool", ["sh", "dvc"])
def test_a_stage_ends_with_its_killed_tool_amid_imports(tmp_path: Path, tool: str) -> None:
    (tmp_path / "stages").mkdir()
    shutil.copy2(ROOT / "stages/__init__.py", tmp_path / "stages")
    (tmp_path / "stages/trial.py").write_text(IMPORTS)
    command = ["sh", "-c", "SHARDLAB_LOCK=1 python -m stages.trial; true"]
    if tool == "dvc":
        stage = "stages: {trial: {cmd: exec python -m stages.trial, deps: [stages]}}"
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
    (tmp_path / "stages").mkdir()
    shutil.copy2(ROOT / "stages/__init__.py", tmp_path / "stages")
    (tmp_path / "stages/chat.py").write_text(IMPORTS)
    marked = Marked(tmp_path, "env", "--default-signal", "python", "-m", "stages.chat")
    try:
        wait_for((tmp_path / "imports").exists, 60, "a stage")
        marked.process.send_signal(signal.SIGINT)
        assert marked.process.wait(15) == -signal.SIGINT
    finally:
        marked.close()
    assert (tmp_path / "marked.log").read_text() == ""
