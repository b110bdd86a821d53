"""How each block computes: what it keeps for backward, and whether it is compiled."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardlab.engines.common.units import checkpointing_modes
from shardlab.models.parts import transformer_blocks
from shardlab.strategy.strategy import CanonicalStrategy

_aten = torch.ops.aten
_PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""operations whose results selective checkpointing keeps: what costs most to compute again"""


def prepare(model: nn.Module, strategy: CanonicalStrategy) -> None:
    """Checkpoints, then compiles the forward methods of the blocks; sharding comes after it.

    A block keeps its names and hooks: what gathers and frees its parameters stays outside of what
    is computed again or compiled, so that nothing is gathered twice.
    """
    modes = checkpointing_modes(model, strategy)
    if not strategy.compile and not modes:
        return
    for block in transformer_blocks(model):
        mode = modes.get(block, "none")
        if mode != "none":
            block.forward = _checkpointed(block, mode)
        if strategy.compile:
            block.forward = torch.compile(block.forward)


def _checkpointed(block: nn.Module, mode: str) -> partial[object]:
    again = partial(checkpoint, block.forward, use_reentrant=False)
    if mode == "full":
        return again
    return partial(again, context_fn=partial(create_selective_checkpoint_contexts, _PRODUCTS))
