"""Blame of a run for a failure of ranks that hold engines of several."""

import mmap
import time

import numpy as np

from shardlab.core.errors import RunFailed, UserError
from shardlab.core.launch_environment import rank_environment
from shardlab.train.plans import TimingPlan

_HUNG = 0.5
"""share of the time of a race after which a single step is the arm's fault"""


class Marks:
    """Runs at which the ranks are, in memory that forked ranks share with their parent."""

    def __init__(self, plan: TimingPlan) -> None:
        self._runs = ["", *plan.runs]
        shape = plan.timing.world_size, 3
        self._ranks = np.frombuffer(mmap.mmap(-1, 24 * shape[0]), np.int64).reshape(shape)

    def mark(self, rank: int, run: str) -> None:
        """Record of which run the next calls of the rank are."""
        count = self._ranks[rank, 0] + 1
        self._ranks[rank] = count, self._runs.index(run), time.monotonic_ns()

    def behind(self) -> tuple[str, float]:
        """Return the run of the rank that has come least far, and for how many seconds it has been
        there; empty: it was at no run.

        Barriers part the steps, so no rank has gone beyond the one that fails.
        """
        marks = self._ranks[self._ranks[:, 0] > 0]  # ranks of torchrun do not share this memory
        if not len(marks):
            return "", 0.0
        _, run, since = marks[marks[:, 0].argmin()]
        return self._runs[int(run)], (time.monotonic_ns() - int(since)) / 1e9


def blamed(
    error: RunFailed | UserError, marks: Marks, plan: TimingPlan, limit_s: float
) -> str | None:
    """Return the arm that made an attempt fail; None where no arm is to blame.

    Raises:
        RunFailed, UserError: no further attempt is possible.
    """
    run, step_s = marks.behind()
    if isinstance(error, RunFailed):
        kind, outcome, detail, summary = error.kind, error.outcome, error.detail, error.summary
    else:
        kind, outcome, detail, summary = "crash", "crash", str(error), str(error)
    if run and rank_environment(plan.timing.world_size) is not None:
        # ranks of torchrun or srun are not this command's to start again
        raise RunFailed(kind, detail, f"{run}: {summary}")
    if isinstance(error, RunFailed) and error.terminated:
        raise error
    at_arm = run in plan.timing.runs
    hung = isinstance(error, RunFailed) and error.hung
    late = kind == "timeout" and not hung and not (at_arm and step_s >= _HUNG * limit_s)
    if late or (outcome == "memory" and run == plan.timing.runs[0]):
        return None
    if not at_arm:
        raise error
    return run
