"""Units of a model: what a strategy gathers and reduces together, their names and types."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardlab.core import torch_private
from shardlab.core.errors import UserError
from shardlab.models.names import by_layer, plain
from shardlab.models.parts import has_dropout, model_parts, transformer_blocks
from shardlab.results.result import UnitSize
from shardlab.strategy.document import CanonicalStrategy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the type of that name; of `auto` the narrowest with fast products on the device."""
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cuda":
        return torch.float32
    made_for_it = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if made_for_it else torch.float16


def uses_fp16(strategy: CanonicalStrategy, device: torch.device) -> bool:
    """Return whether some layer computes in fp16."""
    names = [strategy.param_dtype, *(override.param_dtype for override in strategy.overrides)]
    return any(dtype_of(name, device) is torch.float16 for name in names if name is not None)


_aten = torch.ops.aten
_PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
]
"""operations whose results selective checkpointing keeps, besides attention: what costs most to
compute again"""


class UnitPlan(NamedTuple):
    """Modules that make up one unit."""

    modules: tuple[nn.Module, ...]
    """in the order of their use"""
    reshard_after_forward: bool | int | None
    param_dtype: torch.dtype

    @property
    def needed_in_backward(self) -> bool:
        """Return whether gradients depend on its parameters.

        Those of an embedding depend on the chosen rows alone.
        """
        return not all(isinstance(module, nn.Embedding) for module in self.modules)


def plan_units(
    model: nn.Module, strategy: CanonicalStrategy, device: torch.device
) -> list[UnitPlan]:
    """Return the units of a model by a strategy's canonical form, in the order of their use.

    What belongs to none of them makes up the root, which is not in the list.

    Raises:
        UserError: an override names what the model does not have, or parts of a unit.
    """
    if strategy.wrap == "root":
        return []
    blocks = transformer_blocks(model)
    settings = layer_settings(strategy, len(blocks))
    plans = [
        _plan(strategy, device, [blocks[n] for n in numbers], _common(numbers, settings))
        for numbers in _grouped(blocks, strategy)
    ]
    return _with_ends(model, plans, strategy, device)


def owned_parameters(
    model: nn.Module, plans: Sequence[UnitPlan]
) -> list[tuple[str, dict[str, nn.Parameter]]]:
    """Return name and named parameters of the root, then of each plan's unit.

    A parameter belongs to the first unit that has it.
    """
    names = {parameter: plain(name) for name, parameter in model.named_parameters()}
    paths = {module: plain(name) for name, module in model.named_modules()}
    units = []
    for plan in plans:
        parameters = {names[p]: p for m in plan.modules for p in m.parameters() if p in names}
        units.append((paths[plan.modules[0]], parameters))
        for parameter in parameters.values():
            del names[parameter]
    return [("root", {name: parameter for parameter, name in names.items()}), *units]


def unit_sizes(
    model: nn.Module, strategy: CanonicalStrategy, device: torch.device
) -> list[UnitSize]:
    """Return the units that a canonical strategy gathers or reduces together, in order of use.

    Of `ddp` the buckets as it fills them during backward, or with `sync` the layers that replicas
    exchange; else the root, then the units.

    Args:
        model: not yet wrapped; it may be on the meta device.
    """
    if strategy.bucket_mb is not None and strategy.sync is not None:
        return [_unit_size(name, found.values()) for name, found in by_layer(model).items()]
    if strategy.bucket_mb is not None:
        return _bucket_sizes(model, strategy.bucket_mb)
    owned = owned_parameters(model, plan_units(model, strategy, device))
    return [_unit_size(name, parameters.values()) for name, parameters in owned]


def _bucket_sizes(model: nn.Module, bucket_mb: float) -> list[UnitSize]:
    backwards: list[torch.Tensor] = list(reversed([*model.parameters()]))
    limit = int(bucket_mb * 2**20)
    return [
        _unit_size(f"bucket{number}", [backwards[index] for index in bucket])
        for number, bucket in enumerate(torch_private.assign_buckets(backwards, [limit]))
    ]


def _unit_size(name: str, parameters: Iterable[torch.Tensor]) -> UnitSize:
    return UnitSize(name=name, elements=sum(parameter.numel() for parameter in parameters))


def layer_settings(strategy: CanonicalStrategy, layers: int) -> dict[int, dict[str, Any]]:
    """Return the settings of the overrides of a canonical form, by the number of the layer.

    Raises:
        UserError: a layer that the model does not have.
    """
    settings = {
        n: override.settings() for override in strategy.overrides for n in override.layers or ()
    }
    beyond = [number for number in settings if number >= layers]
    if beyond:
        raise UserError(
            f"overrides: layer {min(beyond)}: the model has {layers} blocks, the last is "
            f"{layers - 1}"
        )
    return settings


def checkpointing_modes(model: nn.Module, strategy: CanonicalStrategy) -> dict[nn.Module, str]:
    """Return the activation checkpointing mode of each block, by a canonical strategy.

    Raises:
        UserError: see `layer_settings`; or the model has no blocks, and they are asked for.
    """
    modes = {override.activation_checkpointing for override in strategy.overrides}
    if modes | {strategy.activation_checkpointing} <= {None, "none"}:
        return {}  # also for models without blocks
    blocks = transformer_blocks(model)
    settings = layer_settings(strategy, len(blocks))
    key, default = "activation_checkpointing", strategy.activation_checkpointing
    return {block: settings.get(n, {}).get(key) or default for n, block in enumerate(blocks)}


def prepare(model: nn.Module, strategy: CanonicalStrategy) -> None:
    """Checkpoint, then compile the forward methods of the blocks; sharding comes after it.

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
    # attention that is kept draws no numbers again, and what drops after it would get others
    kept = _PRODUCTS if has_dropout(block) else [*_PRODUCTS, *torch_private.ATTENTION]
    return partial(again, context_fn=partial(create_selective_checkpoint_contexts, kept))


def _grouped(blocks: Sequence[nn.Module], strategy: CanonicalStrategy) -> Iterator[tuple[int, ...]]:
    """Iterate over the numbers of the blocks of each unit."""
    if strategy.wrap == "block":
        size = strategy.wrap_size or 1
        for first in range(0, len(blocks), size):
            yield tuple(range(first, min(first + size, len(blocks))))
        return
    group: list[int] = []
    elements = 0
    for number, block in enumerate(blocks):
        group.append(number)
        elements += sum(p.numel() for p in block.parameters())
        if elements >= (strategy.wrap_size or 0):
            yield tuple(group)
            group, elements = [], 0
    if group:
        yield tuple(group)


def _common(numbers: Sequence[int], settings: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of a unit, which are those of all of its layers."""
    of_unit = [
        {k: v for k, v in settings.get(n, {}).items() if k != "activation_checkpointing"}
        for n in numbers
    ]
    if any(other != of_unit[0] for other in of_unit):
        raise UserError(
            f"overrides: layers {numbers[0]} to {numbers[-1]} are one unit by wrap_size: give them "
            "the same settings"
        )
    return of_unit[0]


def _plan(
    strategy: CanonicalStrategy,
    device: torch.device,
    modules: Sequence[nn.Module],
    settings: dict[str, Any],
) -> UnitPlan:
    reshard = settings.get("reshard_after_forward", strategy.reshard_after_forward)
    dtype = dtype_of(settings.get("param_dtype", strategy.param_dtype), device)
    return UnitPlan(tuple(modules), reshard, dtype)


def _with_ends(
    model: nn.Module, plans: list[UnitPlan], strategy: CanonicalStrategy, device: torch.device
) -> list[UnitPlan]:
    """Add units of the embedding and the head, where overrides ask for them."""
    overrides = {
        override.module: override.settings() for override in strategy.overrides if override.module
    }
    if not overrides:
        return plans
    parts = model_parts(model)
    ends = {"embedding": parts.embedding, "head": parts.head}
    if parts.tied:
        if len(overrides) == 2 and overrides["embedding"] != overrides["head"]:
            raise UserError(
                "overrides: embedding and head share their weight: give them the same settings"
            )
        modules = [module for module in ends.values() if module is not None]
        both = _plan(strategy, device, modules, next(iter(overrides.values())))
        # used first and last, it is needed all the time
        return [both._replace(reshard_after_forward=False), *plans]
    for name, settings in overrides.items():
        module = ends[name]
        if module is None:
            raise UserError(f"overrides: {type(model).__name__} has no {name}: remove it")
        unit = _plan(strategy, device, [module], settings)
        plans = [unit, *plans] if name == "embedding" else [*plans, unit]
    return plans
