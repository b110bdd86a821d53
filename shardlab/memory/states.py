"""What a rank keeps for each parameter, in closed form.

With P parameters on N ranks in C copies of the model, bytes per rank:

- states: parameters 4 P, gradients 4 P, the two moments of AdamW 8 P, times C / N where they are
  sharded (Rajbhandari et al. 2020, ZeRO, section 3.1, for float32 weights);
- error feedback: 2 B P with B bytes per residual (4, 2 or 1 + 2/128 as fp32, bf16 or int8), since
  each rank keeps what it did not send of its whole gradient, and what that was a step ago; under
  `ddp` also 2 B P / N for the sums that each rank owns.
"""

from shardlab.strategy.strategy import Strategy

_FLOAT = 4
_RESIDUAL = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 128}


def state_bytes(full: Strategy, parameters: int, world_size: int) -> dict[str, int]:
    """Bytes by what they are for, by a canonical form."""
    part = _FLOAT * parameters * _copies(full, world_size) // world_size
    return {
        "parameters": part,
        "gradients": part,
        "moments": 2 * part,
        "residuals": _residuals(full, parameters, world_size),
    }


def _copies(full: Strategy, world_size: int) -> int:
    if full.engine == "ddp" or full.sharding == "no_shard":
        return world_size
    return full.replicas or 1


def _residuals(full: Strategy, parameters: int, world_size: int) -> int:
    if not full.gradients.error_feedback:
        return 0
    kept = parameters + (parameters // world_size if full.engine == "ddp" else 0)
    return int(2 * _RESIDUAL[full.gradients.residual] * kept)
