"""Events that tell steps and passes of a trace that nobody labelled."""

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from shardlab.profiling.intervals import EMPTY, Intervals, merge
from shardlab.profiling.operators import Operators

ENGINE, OPTIMIZER, ASIDE = "engine", "optimizer", "aside"
_NAMES = {
    # every node that the engine runs, hooks included (torch/csrc/autograd/engine.cpp)
    "autograd::engine::evaluate_function": ENGINE,
    # what FSDP2 and FSDP1 do after the last node
    "FSDP::post_backward": ENGINE,
    "FullyShardedDataParallel._post_backward": ENGINE,
    # written by every torch.optim.Optimizer and by DataLoader
    "Optimizer.step#": OPTIMIZER,
    "Optimizer.zero_grad#": ASIDE,
    "enumerate(DataLoader)#": ASIDE,
}
ENGINE_THREAD = "pt_autograd"
"""in the names of the threads of the autograd engine that launch work on devices"""
EVER = np.array([[-np.inf, np.inf]])


@cache
def clue_of(name: str) -> str:
    """Return what an operator or a range tells; empty if nothing."""
    return next((clue for start, clue in _NAMES.items() if name.startswith(start)), "")


@dataclass(frozen=True)
class Clues:
    """Events of one rank that tell its steps and passes; times on the CPU."""

    whole: Intervals = field(default_factory=lambda: EMPTY)
    """from the first event to the last"""
    engine: Intervals = field(default_factory=lambda: EMPTY)
    """nodes of the autograd engine"""
    optimizer: Mapping[str, Intervals] = field(default_factory=dict)
    """calls of `Optimizer.step`, by annotation"""
    aside: Intervals = field(default_factory=lambda: EMPTY)
    """neither pass: `zero_grad`, loading of batches"""
    host: Operators | None = None
    """of the thread that runs the steps; None if no thread ran operators"""
    calls: int = 0
    """of collectives, by c10d's operators"""
    launches: int = 0
    """of work on devices"""
    unlaunched: int = 0
    """kernels and copies without a launch in the trace"""
    earlier: int = 0
    """those of them that were launched before the trace began"""


class ClueReader:
    """Growing clues of one rank."""

    def __init__(self) -> None:
        self._times: dict[str, array[float]] = defaultdict(lambda: array("d"))
        """start, end, start, end, ... by clue, and by annotation for optimizers"""
        self._host: int | None = None
        self.engine_threads: set[int] = set()

    def add(self, clue: str, name: str, start: float, end: float) -> None:
        """Read an event that tells something."""
        self._times[name if clue == OPTIMIZER else clue].extend((start, end))

    def run_by(self, thread: int) -> None:
        """Read which thread annotates steps."""
        if self._host is None:
            self._host = thread

    def finish(self, threads: Mapping[int, Operators], workers: set[int], counted: Clues) -> Clues:
        """Return the clues.

        Args:
            threads: finished operators by thread.
            workers: threads that run collectives.
            counted: what the reader of the trace has found.
        """
        times = {key: merge(np.array(found).reshape(-1, 2)) for key, found in self._times.items()}
        own = self.engine_threads & threads.keys()
        others = [tid for tid in threads if tid not in workers | own]
        return replace(
            counted,
            engine=times.pop(ENGINE, EMPTY) if ENGINE in times else _busy(threads, sorted(own)),
            aside=times.pop(ASIDE, EMPTY),
            optimizer=times,
            host=threads[self._host] if self._host is not None else _busiest(threads, others),
        )


def _busy(threads: Mapping[int, Operators], of: Sequence[int]) -> Intervals:
    return merge(np.concatenate([EMPTY, *(threads[tid].compute(EVER) for tid in of)]))


def _busiest(threads: Mapping[int, Operators], among: Sequence[int]) -> Operators | None:
    """Return the operators of the thread that ran the most of them."""
    if not among:
        return None
    return threads[max(among, key=lambda tid: len(threads[tid].compute(EVER)))]
