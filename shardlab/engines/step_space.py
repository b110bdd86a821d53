"""Checks, before anything is allocated, that a step fits the free memory of device and host.

The bytes are those of the memory model (`shardlab.models.memory`).
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardlab.comm.object_collectives import gather_values
from shardlab.config.schema import Train
from shardlab.config.strategy import Strategy
from shardlab.core.errors import UserError
from shardlab.core.host import free_memory_bytes
from shardlab.engines.slide_config import SlideConfig
from shardlab.models.memory import Categories, Sizes, device_memory, host_memory
from shardlab.models.sizes import sizes_of, state_sizes, with_activations

_LARGEST = 3
_FIX = (
    "lower train.batch_size, set activation_checkpointing: full, take engine: slide or more ranks, "
    "or end what else uses the memory"
)
_HOST_FIX = "take engine: slide, or more nodes, or end what else uses the memory"
_STREAM_FIX = 'set SlideConfig.window=2 and param_dtype="bf16", or end what else uses the memory'
_BATCH_FIX = (
    'give fewer samples per call and raise SlideConfig.accumulation, set activations="memory", or '
    "end what else uses the memory"
)
_CONFIG = ("num_attention_heads", "hidden_size", "vocab_size")
"""what the sizes of activations and logits follow from"""
_HOST = torch.device("cpu")


def refuse_too_large(
    model: PreTrainedModel,
    strategy: Strategy,
    train: Train,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Compare the closed form of a rank's memory with what is free; all ranks call together.

    Args:
        model: not wrapped yet, on any device.

    Raises:
        UserError: a step does not fit, on the ranks where it does not.
    """
    given = strategy, sizes_of(model, strategy, train, device), dist.get_world_size(group)
    needs = [(device, device_memory(*given, device != _HOST), _FIX)]
    if device != _HOST:
        needs.append((_HOST, host_memory(*given), _HOST_FIX))
    free = [free_bytes(place) for place, *_ in needs]
    gather_values(None, group)  # no rank allocates before all have looked
    for (place, need, fix), found in zip(needs, free, strict=True):
        if sum(need.values()) > found:
            raise UserError(too_large("a step", need, found, place, fix))


def free_bytes(device: torch.device) -> int:
    """Return the bytes of the device that a rank can allocate: on a CPU, its part of the host's."""
    if device.type == "cpu":
        return free_memory_bytes() // int(os.environ["LOCAL_WORLD_SIZE"])
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


class GpuMemory:
    """Free memory of a rank's GPU, compared with what streaming and each batch need.

    Args:
        model: that `SlideFSDP` is to stream, before it does.

    Raises:
        UserError: there is too little memory for the window, the root, the gradients that leave
            the GPU, and residuals; in one line with the fix.
    """

    def __init__(
        self, model: nn.Module, config: SlideConfig, device: torch.device, world_size: int
    ) -> None:
        self._strategy = config.strategy()
        self._device, self._world_size = device, world_size
        self._sizes = _sizes(model, config, device)
        self._tokens = 0
        """of the largest batch so far"""
        self._streaming = self._need(0)
        self._free = free_bytes(device)
        self._check("SlideFSDP", self._streaming, self._free, _STREAM_FIX)

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Check activations and logits, too, of a batch with more tokens than any before.

        Batches of models of which these are not known are not checked.

        Raises:
            UserError: there is too little memory, in one line with the fix.
        """
        given = batch.get("input_ids")
        if not self._sizes.vocabulary or not isinstance(given, Tensor):
            return
        if (tokens := given.numel()) <= self._tokens:
            return
        # the script may have freed memory since the start
        free = max(self._free, free_bytes(self._device) + sum(self._streaming.values()))
        self._check(f"a batch of {tokens} tokens", self._need(tokens), free, _BATCH_FIX)
        self._tokens = tokens

    def _need(self, tokens: int) -> Categories:
        sizes = self._sizes._replace(tokens=tokens)
        return device_memory(self._strategy, sizes, self._world_size, on_gpu=True)

    def _check(self, what: str, need: Categories, free: int, fix: str) -> None:
        if sum(need.values()) > free:
            raise UserError(too_large(what, need, free, self._device, fix))


def _sizes(model: nn.Module, config: SlideConfig, device: torch.device) -> Sizes:
    strategy, clips = config.strategy(), config.clip is not None
    sizes = state_sizes(model, strategy, config.accumulation, clips, device)
    if not isinstance(model, PreTrainedModel):
        return sizes
    if not all(hasattr(model.config, name) for name in _CONFIG):
        return sizes
    sizes = with_activations(sizes, model, strategy, 0)
    if model.is_activation_checkpointing:  # its own
        sizes = sizes._replace(checkpointing=("full",) * len(sizes.checkpointing))
    return sizes
