"""Peak memory of a rank before a trial: what is certain of the states, the rest as measured.

Everything is float32. With P parameters, bytes per rank:

- parameters, gradients, moments and error feedback as in `shardlab.memory.states`;
- with one unit, or with parameters kept after forward: 4 P for the gathered parameters; with one
  unit also 4 P for the gradients before they are scattered.

Activations, the interpreter and short-lived message buffers follow no such formula. They are what
the incumbent's measured peak holds beyond its own states, and are assumed to stay.
"""

from shardlab.agent.records.history import Measured, Workload
from shardlab.memory.states import state_bytes
from shardlab.strategy.strategy import Strategy

_FLOAT = 4


def certain_bytes(strategy: Strategy, parameters: int, world_size: int) -> int:
    """Bytes per rank that the formula above accounts for."""
    full = strategy.canonical()
    whole = _FLOAT * parameters
    total = sum(state_bytes(full, parameters, world_size).values())
    if full.engine == "ddp":
        return total
    if full.wrap == "root":
        return total + 2 * whole
    return total + (0 if full.reshard_after_forward else whole)


def estimate_peak(strategy: Strategy, incumbent: Measured, workload: Workload) -> int:
    """Bytes of the largest rank under `strategy`."""
    measured = max(each.memory_peak_bytes for each in incumbent.measurements)
    sizes = workload.parameters, workload.world_size
    rest = max(0, measured - certain_bytes(incumbent.strategy, *sizes))
    return rest + certain_bytes(strategy, *sizes)
