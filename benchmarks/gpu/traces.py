"""Times of a step, from a trace that is kept as a file."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from shardlab.engines.base import Engine
from shardlab.profiling.breakdown import read_steps
from shardlab.profiling.capture import Capture


def traced(engine: Engine, batches: Sequence[Tensor], path: Path) -> dict[str, float]:
    """Trace two steps into a file; return the milliseconds of the second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with Capture(2) as capture:
        for call in range(capture.calls):
            engine.step([batches[call % len(batches)]], 1e-4)
            capture.step()
    capture.export(path)
    step = read_steps(path)[-1]
    return {
        "step, ms": step.step_ms,
        "computation, ms": step.compute_ms,
        "communication, ms": step.comm_ms,
        "exposed communication, ms": step.exposed_comm_ms,
        "copies, ms": step.copy_ms,
        "exposed copies, ms": step.exposed_copy_ms,
        "idle, ms": step.idle_ms,
        **{f"{kind}, ms": ms for kind, ms in sorted(step.copy_ms_by_kind.items())},
    }
