"""Peak memory of a rank before a trial: what is certain of the states, the rest as measured.

Everything is float32. With P parameters on N ranks, bytes per rank:

- parameters 4 P, gradients 4 P and Adam's two moments 8 P; where they are sharded each of them
  divided by the ranks of one copy of the model (the accounting of ZeRO, Rajbhandari et al. 2020,
  section 3.1, for float32 training);
- with one unit, or with parameters kept after forward: 4 P for the gathered parameters; with one
  unit also 4 P for the gradients before they are scattered;
- error feedback: 2 B P with B bytes per residual (4, 2 or 1 + 2/128 as fp32, bf16 or int8), since
  each rank keeps what it did not send of its whole gradient, and what that was a step ago; under
  `ddp` also 2 B P / N for the sums that each rank owns.

Activations, the interpreter and short-lived message buffers follow no such formula. They are what
the incumbent's measured peak holds beyond its own states, and are assumed to stay.
"""

from shardlab.agent.history import Measured, Workload
from shardlab.core.strategy import Strategy

_FLOAT = 4
_RESIDUAL = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 128}


def state_bytes(strategy: Strategy, parameters: int, world_size: int) -> int:
    """Bytes per rank that the formula above accounts for."""
    full = strategy.normal()
    whole = _FLOAT * parameters
    if full.engine == "ddp":
        total = 4 * whole
    else:
        copies = world_size if full.sharding == "no_shard" else full.replicas or 1
        total = 4 * whole * copies // world_size
        if full.wrap == "root":
            total += 2 * whole
        elif not full.reshard_after_forward:
            total += whole
    return total + _residual_bytes(full, parameters, world_size)


def _residual_bytes(full: Strategy, parameters: int, world_size: int) -> int:
    if not full.gradients.error_feedback:
        return 0
    kept = parameters + (parameters // world_size if full.engine == "ddp" else 0)
    return int(2 * _RESIDUAL[full.gradients.residual] * kept)


def estimate_peak(strategy: Strategy, incumbent: Measured, workload: Workload) -> int:
    """Bytes of the largest rank under `strategy`."""
    measured = max(each.memory_peak_bytes for each in incumbent.measurements)
    sizes = workload.parameters, workload.world_size
    rest = max(0, measured - state_bytes(incumbent.strategy, *sizes))
    return rest + state_bytes(strategy, *sizes)
