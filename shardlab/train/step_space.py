"""Checks, before anything is allocated, that a step fits the free memory of device and host.

The bytes are those of the memory model (`shardlab.models.memory`).
"""

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from shardlab.comm.object_collectives import gather_values
from shardlab.core.errors import UserError
from shardlab.core.host import free_memory_bytes, machine_key
from shardlab.models.memory import Categories, device_memory, host_memory
from shardlab.models.settings import StepSize
from shardlab.models.sizes import sizes_of
from shardlab.strategy.document import Strategy

_LARGEST = 3
_FIX = (
    "lower train.batch_size or global_batch_size, set activation_checkpointing: full, take engine: "
    "slide or more ranks, or end what else uses the memory"
)
_HOST_FIX = "take engine: slide, or more nodes, or end what else uses the memory"
_HOST = torch.device("cpu")


def refuse_too_large(
    model: PreTrainedModel,
    strategy: Strategy,
    step: StepSize,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Compare the closed form of a rank's memory with what is free; all ranks call together.

    Args:
        model: not wrapped yet, on any device.

    Raises:
        UserError: a step does not fit, on the ranks where it does not.
    """
    given = strategy, sizes_of(model, strategy, step, device), dist.get_world_size(group)
    needs = [(device, device_memory(*given, device != _HOST), _FIX)]
    if device != _HOST:
        needs.append((_HOST, host_memory(*given), _HOST_FIX))
    # not LOCAL_WORLD_SIZE: nodes of emulated links share a machine
    machine = machine_key()
    sharing = gather_values(machine, group).count(machine)
    free = [free_bytes(place, sharing) for place, *_ in needs]
    gather_values(None, group)  # no rank allocates before all have looked
    for (place, need, fix), found in zip(needs, free, strict=True):
        if sum(need.values()) > found:
            raise UserError(too_large("a step", need, found, place, fix))


def free_bytes(device: torch.device, sharing: int) -> int:
    """Return the bytes of the device that a rank can allocate: on a CPU, its part of the host's.

    Args:
        sharing: number of ranks on this machine.
    """
    if device.type == "cpu":
        return free_memory_bytes() // sharing
    free, _ = torch.cuda.mem_get_info(device)
    # torch keeps what earlier tensors have freed
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def too_large(what: str, need: Categories, free: int, device: torch.device, fix: str) -> str:
    """Return one line: `what` needs more bytes than the device has free."""
    largest = sorted(need, key=lambda name: need[name], reverse=True)[:_LARGEST]
    parts = ", ".join(f"{name} {need[name] / 1e9:.2f}" for name in largest)
    where = "a rank's part of this machine" if device.type == "cpu" else f"{device}"
    return (
        f"{what} needs about {sum(need.values()) / 1e9:.2f} GB ({parts}), and {where} has "
        f"{free / 1e9:.2f} GB free: {fix}"
    )
