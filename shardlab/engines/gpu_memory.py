"""Check, before `SlideFSDP` allocates or computes, that it fits the free memory of a GPU.

The bytes are those of the memory model (`shardlab.models.memory`). On a CPU `NodeMemory` checks that
the machine has the memory.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardlab.core.errors import UserError
from shardlab.engines.slide_config import SlideConfig
from shardlab.engines.step_space import free_bytes, too_large
from shardlab.models.memory import Categories, Sizes, device_memory
from shardlab.models.unit_sizes import state_sizes, with_activations

_FIX = 'set SlideConfig.window=2 and param_dtype="bf16", or end what else uses the memory'
_FIX_OF_BATCH = (
    'give fewer samples per call and raise SlideConfig.accumulation, set activations="memory", or '
    "end what else uses the memory"
)
_CONFIG = ("num_attention_heads", "hidden_size", "vocab_size")
"""what the sizes of activations and logits follow from"""


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
        self._check("SlideFSDP", self._streaming, self._free, _FIX)

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
        self._check(f"a batch of {tokens} tokens", self._need(tokens), free, _FIX_OF_BATCH)
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
