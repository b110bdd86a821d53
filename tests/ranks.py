"""Real gloo ranks for tests: processes that are kept and reused, or fresh ones."""

import atexit
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import resource
import signal
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch._dynamo  # fully_shard imports it at its first call: in seconds, on each forked rank
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardlab.comm.emulated_link import Links
from shardlab.train.launch import launch

OnRank = Callable[[dist.ProcessGroup], dict[str, Tensor] | None]

_TIMEOUT_S = 60.0
_KEPT = 4
"""sizes of groups that are kept at a time: idle ranks take memory"""
_MOST_CALLS = 30
"""of ranks that are kept: each process group that a function has made leaves threads"""
_ENDING_S = 2.0
"""longest wait for a thread of an engine that is gone"""
fresh = False
"""whether the test that runs needs ranks of its own; set by conftest.py"""


def needs_fresh_ranks(item: pytest.Item) -> bool:
    """Whether ranks must be forked from the test: it replaces something, or looks at processes."""
    replaces = "monkeypatch" in getattr(item, "fixturenames", ())
    return replaces or item.get_closest_marker("fresh_ranks") is not None


def run_ranks(
    world_size: int,
    function: OnRank,
    timeout_s: float = _TIMEOUT_S,
    links: Links | None = None,
) -> list[dict[str, Tensor]]:
    """Run `function` on every rank; return the tensors of each, in rank order.

    Starting ranks takes longer than most of what they are asked, so they are kept for later calls.
    Their seed is the rank each time. `function` is copied to them: what it changes in the test's
    own objects is lost, as with forked ranks. Ranks that it leaves in another state are not used
    again. Ranks are started for this call alone where it has a timeout or links of its own, and in
    tests that `needs_fresh_ranks` names.

    Raises:
        Exception: what `launch` raises for a rank that failed; kept ranks then end.
    """
    with tempfile.TemporaryDirectory() as folder:
        message = None
        if not (fresh or links or timeout_s != _TIMEOUT_S):
            message = _copy(function, folder)
        if message is None:

            def worker(group: dist.ProcessGroup) -> None:
                _run(function, group, folder)

            launch(worker, world_size, threads=1, timeout_s=timeout_s, links=links)
        else:
            ranks = _kept_ranks(world_size)
            ranks.run(message)
            if not ranks.unchanged or ranks.calls >= _MOST_CALLS:
                _KEPT_RANKS.pop(world_size).close()
        return _results(folder, world_size)


def on_ranks(world_size: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on every rank: on as many as its argument `world_size` says, if none are given.

    The test's argument `group` is the process group; its other arguments are pytest's.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        named = dict(inspect.signature(test).parameters)
        takes_group = named.pop("group", None) is not None

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            def on_rank(group: dist.ProcessGroup) -> None:
                test(**arguments, **({"group": group} if takes_group else {}))

            run_ranks(world_size or arguments["world_size"], on_rank)

        # pytest and hypothesis read which arguments to give: all but the group
        run.__signature__ = inspect.Signature(list(named.values()))  # type: ignore[attr-defined]
        del run.__wrapped__
        return run

    return decorate


def _copy(function: OnRank, folder: str) -> bytes | None:
    """None where the function refers to what only a forked rank has, such as a bound operator."""
    try:
        return cloudpickle.dumps((function, folder))
    except (AttributeError, TypeError, pickle.PicklingError):
        return None


def _run(function: OnRank, group: dist.ProcessGroup, folder: str) -> None:
    rank = dist.get_rank(group)
    torch.manual_seed(rank)
    found = {k: v.detach().clone().contiguous() for k, v in (function(group) or {}).items()}
    save_file(found, str(Path(folder, f"{rank}.safetensors")))


def _results(folder: str, world_size: int) -> list[dict[str, Tensor]]:
    return [load_file(Path(folder, f"{rank}.safetensors")) for rank in range(world_size)]


def _state() -> tuple[object, ...]:
    """Settings of this process that the next function would inherit."""
    gc.collect()  # engines that are in reference cycles end their threads and files
    for thread in {*threading.enumerate()} - {threading.current_thread()}:
        thread.join(_ENDING_S)  # it was told to end, and does so when it is next scheduled
    gc.freeze()  # what is left stays, such as modules: the next collection need not search it
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        threading.active_count(),
        {**os.environ},
        Path.cwd(),
        os.sched_getaffinity(0),
        [resource.getrlimit(limit) for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)],
    )


class _Ranks:
    """Ranks of one launch, which run one function after another until they are closed."""

    def __init__(self, world_size: int) -> None:
        pipes = [multiprocessing.Pipe() for _ in range(world_size)]
        self._ours = [ours for ours, _ in pipes]
        self._error: BaseException | None = None
        self._pids: list[int] = []
        self.calls = 0
        self.unchanged = True
        """whether the functions have left the ranks as they were"""
        theirs = [each for _, each in pipes]

        def serve(group: dist.ProcessGroup) -> None:
            pipe = theirs[dist.get_rank(group)]
            before = _state()
            while message := pipe.recv_bytes():
                function, folder = cloudpickle.loads(message)
                _run(function, group, folder)
                del function
                pipe.send((os.getpid(), _state() == before))

        def start() -> None:
            try:
                launch(serve, world_size, threads=1, timeout_s=_TIMEOUT_S)
            except BaseException as error:  # raised again by `run`, in the test's own thread
                self._error = error

        # a thread, since `launch` returns when the ranks have ended; they die with this thread
        self._thread = threading.Thread(target=start, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, message: bytes) -> None:
        self.calls += 1
        self._send(message)
        waiting = list(self._ours)
        while waiting and self.alive:
            for pipe in wait(waiting, timeout=0.1):
                assert isinstance(pipe, Connection)
                pid, same = pipe.recv()
                self._pids.append(pid)
                self.unchanged &= same
                waiting.remove(pipe)
        if waiting:
            self._thread.join()
            assert self._error is not None, "ranks end by an error or when they are closed"
            raise self._error
        self._signal(signal.SIGSTOP)  # or their threads would wake all the time

    def close(self) -> None:
        if self.alive:
            self._send(b"")
            self._thread.join()

    def _send(self, message: bytes) -> None:
        self._signal(signal.SIGCONT)
        self._pids.clear()
        for pipe in self._ours:
            pipe.send_bytes(message)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


_KEPT_RANKS: dict[int, _Ranks] = {}


def _kept_ranks(world_size: int) -> _Ranks:
    ranks = _KEPT_RANKS.pop(world_size, None)
    if ranks is None or not ranks.alive:
        ranks = _Ranks(world_size)
    _KEPT_RANKS[world_size] = ranks  # the one that was used last comes last
    while len(_KEPT_RANKS) > _KEPT:
        _KEPT_RANKS.pop(next(iter(_KEPT_RANKS))).close()
    return ranks


@atexit.register
def _close_all() -> None:
    for ranks in _KEPT_RANKS.values():
        ranks.close()
