"""Forks of the server do what new processes of Python and of the tools do."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.pipeline.conftest import copy
from tests.pipeline.workspace import run, speaking, wait_for

SCRIPT = """
import os, signal, sys, threading, __main__
print(sys.argv[1:], os.getcwd(), sys.path[0], __name__, __file__, __main__.__file__)
print(sys.stdin.read(), sys.stdin.isatty(), os.environ["PATH"].count(os.pathsep) > 0)
print(sorted(name for name in sys.modules if name.startswith(("shardlab", "stages", "tests"))))
print(oct(os.umask(0)), file=sys.stderr)
threading.Timer(0.1, print, ["from a thread"]).start()
how = sys.argv[1]
if how == "raise":
    raise ValueError("x")
if how == "wait":
    open("waits", "w").close()
    signal.pause()
sys.exit(int(how) if how.isdigit() else how)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "folder" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("how, code", [("0", 0), ("3", 3), ("words", 1), ("raise", 1)])
def test_a_fork_runs_as_a_new_process(tmp_path: Path, script: str, how: str, code: int) -> None:
    command = ["sh", "-c", 'umask 027; echo text | python "$0" "$@"', script, how, "two words"]
    forked, new = (run(tmp_path, *command, check=False, warm=warm) for warm in (True, False))
    assert forked.returncode == new.returncode == code

    def lines(said: str) -> list[str]:
        # frames of the server; how the streams mix is not defined
        return sorted(line for line in said.splitlines() if not line.startswith("  "))

    assert lines(forked.stdout) == lines(new.stdout)
    assert "from a thread" in forked.stdout


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_ends_with_its_client(tmp_path: Path, script: str, sig: int) -> None:
    client = subprocess.Popen(["python", script, "wait"], **speaking(tmp_path, warm=True))
    wait_for((tmp_path / "waits").exists, 20, "a fork")
    os.kill(client.pid, sig)
    assert client.wait(20) == -sig
    # the stream ends when the fork, which has it too, has ended
    assert client.communicate(timeout=20)[0] is not None


def test_a_command_of_an_unusual_environment_is_a_new_process(tmp_path: Path, script: str) -> None:
    Path(script).write_text("import os, sys; print(sys.flags.utf8_mode, os.getppid())")
    command = ("sh", "-c", 'echo $$; PYTHONUTF8=1 python "$0"; python "$0"', script)
    shell, new, forked = run(tmp_path, *command).stdout.splitlines()
    assert new == f"1 {shell}"
    assert forked.split()[1] != shell


@pytest.mark.long
@pytest.mark.timeout(900)
def test_outputs_are_those_of_new_processes(finished: Path, tmp_path: Path) -> None:
    """Both tools and stages of every kind of import: data, models, tables and figures."""
    root = copy(finished, tmp_path / "project")
    validation = "results/validate/fsdp2-int8/seed0.json"
    run(root, "python", "-m", "stages.report", warm=False)
    again = ("snakemake", "--cores", "2", "--forcerun", "prepare", "train", "validate")
    run(root, *again, "--", validation, warm=False)
    same = [*(root / "results/report").glob("*.*"), *(root / "data/tokens").glob("*.bin")]
    same += [root / validation, *root.glob("results/train/fsdp2-int8/seed0/*/*.safetensors")]
    assert len(same) > 8
    for path in same:
        assert path.read_bytes() == (finished / path.relative_to(root)).read_bytes(), path
