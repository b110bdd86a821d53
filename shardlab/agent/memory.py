"""Peak memory of a rank before a trial: what is certain of the states, the rest as measured.

Everything is float32. With P parameters on N ranks, bytes per rank:

- parameters 4 P, gradients 4 P and Adam's two moments 8 P; under `fsdp2` each of them divided by N
  (the accounting of ZeRO, Rajbhandari et al. 2020, section 3.1, for float32 training);
- `fsdp2` with one unit, or with parameters kept after forward: 4 P for the gathered parameters;
  with one unit also 4 P for the gradients before they are scattered;
- error feedback: 4 P, since each rank keeps what it did not send of its whole gradient.

Activations, the interpreter and short-lived message buffers follow no such formula. They are what
the incumbent's measured peak holds beyond its own states, and are assumed to stay.
"""

from shardlab.agent.history import Measured, Workload
from shardlab.core.strategy import Strategy

_FLOAT = 4


def state_bytes(strategy: Strategy, parameters: int, world_size: int) -> int:
    """Bytes per rank that the formula above accounts for."""
    full = strategy.normal()
    whole = _FLOAT * parameters
    if full.engine == "ddp":
        total = 4 * whole
    else:
        total = 4 * whole // world_size
        if full.wrap == "root":
            total += 2 * whole
        elif not full.reshard_after_forward:
            total += whole
    return total + (whole if full.gradients.error_feedback else 0)


def estimate_peak(strategy: Strategy, incumbent: Measured, workload: Workload) -> int:
    """Bytes of the largest rank under `strategy`."""
    measured = max(each.memory_peak_bytes for each in incumbent.measurements)
    sizes = workload.parameters, workload.world_size
    rest = max(0, measured - state_bytes(incumbent.strategy, *sizes))
    return rest + state_bytes(strategy, *sizes)
