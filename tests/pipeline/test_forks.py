"""Stages that are forks of a server do what processes of their own do, and end with them."""

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardlab.core.process import command_line
from stages import forks
from tests.pipeline.conftest import copy
from tests.pipeline.workspace import ROOT, Marked, environment, run, wait_for

UNCHANGED = ("env", "--default-signal")
"""who runs the tests in the background may ignore some signals, and children inherit that"""
STAGE = """
import atexit, os, signal, sys, threading
if __name__ != "__main__":
    open("imported", "a").write("x")
else:
    how = sys.argv[1]
    print(sys.argv[1:], __file__, __spec__.name, sys.stdin.read(), os.environ.get("ODD"))
    print("an error", file=sys.stderr)
    print("SHARDLAB_FORKS" in os.environ, os.getcwd(), signal.getsignal(signal.SIGINT))
    atexit.register(print, "at the end")
    threading.Timer(0.1, print, ["from a thread"]).start()
    if how == "raise":
        raise ValueError("x")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if "orderly" in sys.argv:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("put in order"))
        open("waits", "w").close()
        while True:
            signal.pause()
    sys.exit(int(how) if how.isdigit() else how)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its stage `trial` imports nothing that takes time."""
    (tmp_path / "stages").mkdir()
    for file in ("__init__.py", "forks.py"):
        shutil.copy2(ROOT / "stages" / file, tmp_path / "stages")
    (tmp_path / "stages/trial.py").write_text(STAGE)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [*UNCHANGED, sys.executable, "-m", "stages.forks", name_of(folder), str(os.getpid())]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL) as process:
        line = f"@{name_of(folder)}\n"
        wait_for(lambda: line in Path("/proc/net/unix").read_text(), 20, "a server")
        yield process
        process.kill()


def name_of(folder: Path) -> str:
    """Each test has a server of its own."""
    return f"shardlab-test-{uuid.uuid5(uuid.NAMESPACE_URL, str(folder))}"


def children(pid: int) -> list[int]:
    """The oldest first."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def started(folder: Path, *words: str, forked: bool = True) -> subprocess.Popen[str]:
    variables = environment(ODD="a\udcff b", **{forks.VARIABLE: name_of(folder)} if forked else {})
    (folder / "input").write_text("text")
    return subprocess.Popen(
        [*UNCHANGED, "python", "-m", *words],
        cwd=folder,
        env=variables,
        stdin=(folder / "input").open(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="surrogateescape",
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit code, and lines of both streams without those of a traceback's frames."""
    said = process.communicate(timeout=30)[0].splitlines()
    return process.returncode, sorted(line for line in said if not line.startswith("  "))


@pytest.mark.parametrize("how", ["0", "3", "words", "raise", "kill"])
def test_a_fork_runs_as_a_process_of_its_own(server, folder: Path, how: str) -> None:
    words = ("stages.trial", how, "two words")
    forked, own = (ended(started(folder, *words, forked=forked)) for forked in (True, False))
    assert forked == own
    assert (folder / "imported").read_text() == "x"


def test_forks_run_side_by_side_and_show_their_command(server, folder: Path) -> None:
    waiting = started(folder, "stages.trial", "wait", "--for=ever")
    wait_for((folder / "waits").exists, 20, "a fork")
    assert ended(started(folder, "stages.trial", "0"))[0] == 0
    attendant, *_ = children(server.pid)
    [fork] = children(attendant)
    assert (
        command_line(int(fork))
        == command_line(waiting.pid)
        == "python -m stages.trial wait --for=ever"
    )
    waiting.terminate()
    ended(waiting)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_fork_ends_with_the_stage(server, folder: Path, sig: int) -> None:
    stage = started(folder, "stages.trial", "wait")
    wait_for((folder / "waits").exists, 20, "a fork")
    stage.send_signal(sig)
    # the stream ends when the fork, which has it too, has ended
    code, said = ended(stage)
    assert code == -sig
    assert any("KeyboardInterrupt" in line for line in said) == (sig == signal.SIGINT)


def test_a_stage_waits_until_its_fork_has_put_things_in_order(server, folder: Path) -> None:
    stage = started(folder, "stages.trial", "wait", "orderly")
    wait_for((folder / "waits").exists, 20, "a fork")
    server.send_signal(signal.SIGTERM)  # as Snakemake does when it is ended
    stage.send_signal(signal.SIGTERM)
    code, said = ended(stage)
    assert code == 1 and "put in order" in said and server.poll() is None


def test_forks_end_with_a_killed_server(server, folder: Path) -> None:
    stage = started(folder, "stages.trial", "wait", "orderly")
    wait_for((folder / "waits").exists, 20, "a fork")
    server.kill()
    code, said = ended(stage)
    assert code == 1 and "put in order" in said


def test_other_stages_and_failed_imports_run_as_processes_of_their_own(
    server, folder: Path
) -> None:
    (folder / "stages/other.py").write_text(STAGE)
    assert ended(started(folder, "stages.other", "4"))[0] == 4
    assert not (folder / "imported").exists()
    (folder / "stages/trial.py").write_text("raise ValueError('broken')")
    code, said = ended(started(folder, "stages.trial", "0"))
    assert code == 1 and "ValueError: broken" in said
    server.kill()
    server.wait()
    (folder / "stages/trial.py").write_text(STAGE)
    assert ended(started(folder, "stages.trial", "5"))[0] == 5


def test_a_server_outlives_requests_that_are_none(server, folder: Path) -> None:
    for message in (b"", b"1", struct.pack("q", 5) + b"noise", struct.pack("q", -1) + b"{}"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{name_of(folder)}")
            connection.send(message)
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert ended(started(folder, "stages.trial", "3"))[0] == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gets_no_fork(server, folder: Path) -> None:
    request = json.dumps([["stages.trial", "0"], {}]).encode()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as connection, suppress(ConnectionError):
            connection.connect(f"\0{name_of(folder)}")
            socket.send_fds(connection, [struct.pack("q", len(request))], [0, 1, 2])
            os._exit(len(connection.recv(1)))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not (folder / "imported").exists()


def of_dvc(folder: Path, **stages: str) -> None:
    """Make stages of DVC, one after the other, of commands of the stage `trial`."""
    text, before = "stages:\n", "stages"
    for name, words in stages.items():
        text += f"  {name}:\n    cmd: exec python -m stages.trial {words}\n    deps: [{before}]\n"
        text += f"    outs: [{name}]\n"
        before = name
    (folder / "dvc.yaml").write_text(text)
    run(folder, "dvc", "init", "--quiet", "--no-scm")


def test_stages_of_one_dvc_are_forks_of_one_server(folder: Path) -> None:
    """With the environment and the parent's number that a process of its own would have."""
    last = """attendant = open(f"/proc/{os.getppid()}/stat").read()
    print('dvc', os.environ.get('SHARDLAB_DVC'), 'server', attendant.rpartition(") ")[2].split()[1])
    open(how, "w").close()"""
    code = STAGE.replace("sys.exit(int(how) if how.isdigit() else how)", last)
    (folder / "stages/trial.py").write_text(code)
    of_dvc(folder, one="one", two="two")
    marked = Marked(folder, "dvc", "repro")
    try:
        assert marked.process.wait(60) == 0
        wait_for(lambda: not marked.family(), 15, "no process left")
    finally:
        marked.close()
    said = (folder / "marked.log").read_text()
    assert "Warning" not in said
    [(dvc, server), again] = re.findall(r"^dvc (\d+) server (\d+)$", said, re.MULTILINE)
    assert (dvc, server) == again and dvc == str(marked.process.pid) != server


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_ends_with_dvc(folder: Path, sig: int) -> None:
    of_dvc(folder, one="wait orderly")
    marked = Marked(folder, *UNCHANGED, "dvc", "repro")
    try:
        wait_for((folder / "waits").exists, 60, "a fork")
        marked.process.send_signal(sig)
        wait_for(lambda: not marked.family(), 15, "no process left")
    finally:
        marked.close()
    assert "put in order" in (folder / "marked.log").read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_snakemake_runs_stages_as_forks_with_the_same_results(
    finished: Path, tmp_path: Path
) -> None:
    root = copy(finished, tmp_path / "project")
    said = (
        "import sys\n__name__ == '__main__' and print('forked', 'stages.forks' in sys.orig_argv)\n"
    )
    validation = "results/validate/fsdp2-int8/seed0.json"
    for stage in ("train", "validate"):
        path = root / f"stages/{stage}.py"
        path.write_text(path.read_text().replace("if __name__", f"{said}if __name__"))
    command = ("snakemake", "--cores", "2", "--", validation)
    marked = Marked(root, *command)
    try:
        assert marked.process.wait(300) == 0
        wait_for(lambda: not marked.family(), 15, "no process left")
    finally:
        marked.close()
    # the first job may come before the server listens
    train, validate = re.findall(r"^forked (\w+)$", (root / "marked.log").read_text(), re.MULTILINE)
    assert train in ("False", "True") and validate == "True"
    for path in (root / validation, *root.glob("results/train/fsdp2-int8/seed0/*/*.safetensors")):
        assert path.read_bytes() == (finished / path.relative_to(root)).read_bytes(), path
    assert "Nothing to be done" in run(root, *command).stdout
