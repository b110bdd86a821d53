"""Stages as forks of a server that has done their imports: some 5 s of CPU less for each.

The server lives as long as one command of Snakemake, which starts it (`workflow/rules/forks.smk`),
or of DVC, of which the first stage does. A stage sends it arguments, environment and streams, and
ends as the fork does that runs them. Elsewhere (on a cluster, in a terminal) stages are processes
of their own.

    stage ── socket ── attendant ── fork that runs the stage
                          │
                        server, which imports a stage when it is first asked for

The attendant passes signals to the fork, and its exit code back. If the stage is killed, so is the
fork; if the server is, each fork gets SIGTERM.
"""

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import typing
import zlib
from contextlib import suppress
from pathlib import Path

VARIABLE = "SHARDLAB_FORKS"
"""environment variable with the name of the server's socket in Linux's abstract namespace"""
STAGES = {
    f"stages.{name}"
    for name in ("calibrate", "estimate", "propose", "timing", "train", "trial", "validate")
}
"""those that import models; their other imports are small: forks hold little that is not theirs"""
DVC = "SHARDLAB_DVC"
"""environment variable of a fork with the process id of the DVC that started its stage"""
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_PATIENCE_S = 10.0
"""for the request of a stage that has connected, and for a server that was started"""


class _Request(typing.NamedTuple):
    words: list[str]
    """module and arguments"""
    variables: dict[str, str]
    streams: list[int]
    """descriptors of input, output and errors"""


def hand_over() -> None:
    """Have the server run the stage that this process was started for, and end as its fork does.

    Returns where there is no server, or one that cannot: then this process runs the stage.
    """
    name, variables = os.environ.pop(VARIABLE, None), dict(os.environ)
    words = sys.orig_argv[2:]  # of python -m stages.NAME ARGUMENTS
    if not STAGES.intersection(words[:1]):
        return
    if name is None and "DVC_STAGE" in variables:
        name = _server_of_dvc()
        variables[DVC] = str(os.getppid())
    if name is None:
        return
    message = json.dumps([words, variables]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        accepted = b""
        with suppress(OSError):
            server.connect(f"\0{name}")
            if _is_ours(server):
                socket.send_fds(server, [struct.pack("q", len(message))], [0, 1, 2])
                server.sendall(message)
                accepted = server.recv(1)
        if accepted:
            _end_as_told(server)


def _server_of_dvc() -> str | None:
    """Return the name of the server of the DVC that started this stage, after starting it if there
    is none; None for stages of others."""
    dvc = os.getppid()
    words = Path(f"/proc/{dvc}/cmdline").read_text(errors="replace").split("\0")[:3]
    if "dvc" not in (Path(word).name for word in words):
        return None
    # neither of a process that had this number before, nor of another folder
    begun = Path(f"/proc/{dvc}/stat").read_text().rpartition(") ")[2].split()[19]
    name = f"shardlab-{dvc}-{begun}-{zlib.crc32(bytes(Path.cwd()))}"
    if not _listens(name):
        command = (sys.executable, "-m", "stages.forks", name, str(dvc))
        # a stage of DVC it is not
        others = {key: value for key, value in os.environ.items() if key != "DVC_STAGE"}
        subprocess.Popen(command, stdin=subprocess.DEVNULL, env=others)
        deadline = time.monotonic() + _PATIENCE_S
        while not _listens(name) and time.monotonic() < deadline:
            time.sleep(0.01)
    return name


def _listens(name: str) -> bool:
    return f"@{name}\n" in Path("/proc/net/unix").read_text(errors="replace")


def _end_as_told(server: socket.socket) -> typing.NoReturn:
    def forward(number: int, frame: object) -> None:
        with suppress(OSError):  # the fork has just ended
            server.sendall(bytes([number]))

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    answer = b""
    with suppress(OSError):
        answer = server.recv(4)
    [code] = struct.unpack("i", answer or struct.pack("i", 1))  # none: the server was killed
    if code < 0:
        if -code in _SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(name: str, tool: int) -> list[str]:
    """Answer stages until a process ends, that of Snakemake or DVC.

    Returns:
        in each fork, the module and the arguments of the stage that it runs.
    """
    from shardlab.core.process import die_with_parent, show_command

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the stages get them, and end first
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for attendants
    server = os.getpid()
    try:
        ended = os.pidfd_open(tool)
    except ProcessLookupError:
        sys.exit()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        while ended not in select.select([listener.fileno(), ended], [], [])[0]:
            stage, _ = listener.accept()
            with stage:
                request = _receive(stage)
                if request is None:
                    continue
                if _imported(request.words[0]) and not _ready(ended) and os.fork() == 0:
                    die_with_parent(server)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    attendant = os.getpid()
                    if pid := os.fork():
                        _attend(stage, pid)
                    die_with_parent(attendant, signal.SIGTERM)
                    os.close(ended)
                    _become(request)
                    show_command(["-m", *request.words])
                    return request.words
                for stream in request.streams:
                    os.close(stream)
    sys.exit()


def _ready(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _receive(stage: socket.socket) -> _Request | None:
    """Read the request of a stage; None where it ends meanwhile or is somebody else's."""
    stage.settimeout(_PATIENCE_S)
    with suppress(OSError, ValueError, struct.error), stage.makefile("rb") as content:
        if _is_ours(stage):
            length, streams, *_ = socket.recv_fds(stage, 8, 3)
            words, variables = json.loads(content.read(*struct.unpack("q", length)))
            stage.settimeout(None)
            return _Request(words, variables, streams)
    return None


def _is_ours(connection: socket.socket) -> bool:
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", peer)
    return bool(user == os.getuid())


def _imported(module: str) -> bool:
    """Import a stage and what it needs; without success, the stage shows the error itself."""
    with suppress(Exception):
        importlib.import_module(module)
        del sys.modules[module]  # it will run as the main module
        sys.stdout.flush()  # each fork would print again what an import has printed
        return True
    return False


def _attend(stage: socket.socket, pid: int) -> typing.NoReturn:
    """Pass signals from a stage to its fork, and the exit code of the fork back."""
    with suppress(OSError):  # it has ended: its side is closed, as the loop finds
        stage.sendall(b"y")
    fork = os.pidfd_open(pid)
    while fork not in select.select([fork, stage.fileno()], [], [])[0]:
        number = b""
        with suppress(ConnectionError):
            number = stage.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        stage.sendall(struct.pack("i", code))
    os._exit(0)


def _become(request: _Request) -> None:
    """Take over what a stage has of its process."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request.variables)
    tempfile.tempdir = None  # it is looked up again
    # libraries have read the variable; Snakemake gives each job its own
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _end() -> None:
    """End this process without taking its modules apart: a fork would copy most of its memory for
    that, which takes 0.3 s."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    atexit.register(_end)  # before all others, so that it is called after them
    try:
        module, *arguments = serve(sys.argv[1], int(sys.argv[2]))
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException:
        atexit.unregister(_end)  # the interpreter finds the exit code
        raise
