"""Commands that launch ranks: real processes that tests watch, kill and read the output of."""

import os
import runpy
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psutil
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import main

from shardlab.core.errors import RunFailed, UserError
from shardlab.core.process import die_with_parent
from shardlab.train.launch import Worker, launch

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Command:
    """A process that makes a call, in a session of its own, which whatever it starts shares.

    Args:
        folder: for what it says, and for its temporary files.
        environment: added to its own.
    """

    def __init__(
        self, folder: Path, call: Callable[[], None], environment: dict[str, str] | None = None
    ) -> None:
        self._folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        (folder / "said").touch()

        def run() -> None:
            die_with_parent(parent)
            os.setsid()
            # who runs the tests in the background may ignore it, and children inherit that
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ |= {"TMPDIR": str(self.temporary)} | (environment or {})
            tempfile.tempdir = None
            output = os.open(folder / "said", os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            call()

        parent = os.getpid()
        self._process = get_context("fork").Process(target=run)
        self._process.start()
        self.pid = self._process.pid

    def wait(self, seconds: float = 120) -> int:
        """The exit code."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"still there after {seconds} s:\n{self.said()}"
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def said(self) -> str:
        return (self._folder / "said").read_text()

    def family(self) -> list[int]:
        """It and its ranks, as far as they live."""
        found = []
        for pid in psutil.pids():
            with suppress(ProcessLookupError):  # it ended meanwhile
                if os.getsid(pid) == self.pid and is_running(pid):
                    found.append(pid)
        return found


def said_after(prepare: Callable[[], object], call: Callable[[], object], folder: Path) -> str:
    """What a process says that prepares itself, such as its disks or its rights, and then calls.

    Prepare nothing of the kind in pytest's own process: one that was another user for a while, and
    whatever it forks later, cannot be looked into (prctl(2), PR_SET_DUMPABLE).

    Args:
        folder: an existing one, on another disk.
    """

    def both() -> None:
        prepare()
        call()

    command = Command(folder / "command", both)
    code = command.wait()
    assert code == 0, command.said()
    return command.said()


def launching(
    folder: Path,
    worker: Worker,
    world_size: int,
    timeout_s: float = 30,
    environment: dict[str, str] | None = None,
) -> Command:
    """Start a command that launches ranks.

    Its exit code is 0, or 1 when the run failed, or 2 when the user made a mistake.
    """

    return Command(folder, partial(_launch, worker, world_size, timeout_s), environment)


def _launch(worker: Worker, world_size: int, timeout_s: float) -> None:
    """Show errors as a stage does (stages.common)."""
    try:
        launch(worker, world_size, 1, timeout_s)
    except (UserError, RunFailed) as error:
        print("error:", error, flush=True)
        sys.exit(2 if isinstance(error, UserError) else 1)


def typed(
    folder: Path,
    project: Path,
    module: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
) -> Command:
    """Start `python -m MODULE ARGUMENTS` in the folder `project`, without the time for imports."""

    def call() -> None:
        os.chdir(project)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return Command(folder, call, environment)


def forked(folder: Path, line: list[str]) -> Command:
    """Start a command line of TORCHRUN by fork, as it starts its ranks: none imports anything."""
    options = ["--run-path", "--start-method=fork", *line[len(TORCHRUN) :]]

    def call() -> None:
        _name_no_events()
        main(options)

    return Command(folder, call)


def wait_for(condition: Callable[[], bool], seconds: float = 120, pause_s: float = 0.02) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(pause_s)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """Return a port that the system gives to no connection: one could take it before its use."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        # not by a seed, which other workers of pytest may have as well
        port = first // 2 + secrets.randbelow(first - first // 2)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def agents(
    folder: Path,
    worker: Worker,
    world_size: int,
    max_restarts: int = 0,
) -> list[Command]:
    """Start torchrun's agent of two nodes, both on this machine.

    The agents fork their processes, which is faster than what `torchrun` does: they need no
    imports.
    """
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=world_size // 2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        # 5 s by default, which an agent misses where other work has the CPUs
        rdzv_configs={"heartbeat_timeout": 60},
        max_restarts=max_restarts,
        start_method="fork",
        local_addr="127.0.0.1",
    )

    def agent() -> None:
        _name_no_events()
        elastic_launch(config, _launch)(worker, world_size, 30.0)

    return [Command(folder / f"node{node}", agent) for node in range(2)]


def _name_no_events() -> None:
    """Spare this process, which is a fork of the tests, names of events that nobody logs.

    An agent calls `inspect.stack` for the name of each event, and that compares every frame with
    all modules: thousands are imported here, a few in a command of torchrun.
    """
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
