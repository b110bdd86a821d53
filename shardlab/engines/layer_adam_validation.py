"""Validation for `LayerAdam`: each check raises a UserError that names the fix."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlab.codecs.adam import MOMENT_DTYPES, PARAMETER_DTYPES
from shardlab.core.errors import UserError, nearest

Group = dict[str, Any]
"""an entry of `Optimizer.param_groups`"""
Moments = Mapping[str, torch.dtype]

_OF_TORCH = ("foreach", "fused", "capturable", "differentiable")
_OF_ALL_LAYERS = ("exp_avg_dtype", "exp_avg_sq_dtype", "threads", "cpus")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_options(unknown: Iterable[str], settings: Iterable[str]) -> None:
    """Refuse unknown arguments of the constructor."""
    for name in unknown:
        if name in _OF_TORCH:
            raise UserError(
                f"LayerAdam: {name} is for torch's implementations of AdamW; there is one here, "
                "which computes the bits of fused=True: leave it out"
            )
        raise UserError(
            f"LayerAdam: no setting {name!r}; {nearest(name, [*settings, *_OF_ALL_LAYERS])}"
        )


def check_moments(dtypes: Moments) -> None:
    """Refuse types that are too narrow for moments."""
    for name, dtype in dtypes.items():
        if dtype == torch.float16:
            raise UserError(
                f"LayerAdam: {name}_dtype is float16, in which small gradients vanish (their "
                "squares below 6e-8) and steps grow too large: use bfloat16 or float32"
            )
        if dtype not in MOMENT_DTYPES:
            raise UserError(f"LayerAdam: {name}_dtype is {dtype}: use bfloat16 or float32")


def check_settings(group: Group) -> None:
    """Refuse a group whose settings are out of range, or none of a group."""
    if group["amsgrad"]:
        raise UserError("LayerAdam: amsgrad is not computed here: use torch.optim.AdamW for it")
    for name in _OF_ALL_LAYERS:
        if name in group:
            raise UserError(f"LayerAdam: {name} is for all layers: give it to LayerAdam itself")
    for name in ("lr", "eps", "weight_decay"):
        value = _number(name, group[name])
        if not 0 <= value < math.inf:
            raise UserError(f"LayerAdam: {name} is {value}: it must be 0 or more, and finite")
    given = group["betas"]
    betas = [_number("betas", beta) for beta in given] if isinstance(given, Sequence) else []
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"LayerAdam: betas are {given}: two numbers, each must be in [0, 1)")
    for name, kind in (("seed", int), ("maximize", bool), ("decoupled_weight_decay", bool)):
        if not isinstance(group[name], kind):
            raise UserError(f"LayerAdam: {name} is {group[name]!r}: give {_ARTICLES[kind]}")


_ARTICLES = {int: "an integer", bool: "True or False"}


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if not isinstance(value, Real):
        raise UserError(f"LayerAdam: {name} is {value!r}: give a number")
    return float(value)


def check_threads(threads: Any, cpus: Any) -> None:
    """Refuse what is no number of threads, or no list of CPUs."""
    if not isinstance(threads, int):
        raise UserError(f"LayerAdam: threads is {threads!r}: give an integer")
    listed = isinstance(cpus, list) and all(isinstance(cpu, int) for cpu in cpus)
    if cpus is not None and not listed:
        raise UserError(f"LayerAdam: cpus are {cpus!r}: give a list of integers")


def check_parameter(parameter: Tensor) -> None:
    """Refuse a parameter that the kernel cannot take; a shard, on the rank that holds it."""
    part = local(parameter.detach())
    shown = f"LayerAdam: a parameter {tuple(parameter.shape)}"
    if part.dtype not in PARAMETER_DTYPES:
        raise UserError(
            f"{shown} is {part.dtype}: use float32, bfloat16 or float16, or torch.optim.AdamW"
        )
    if part.device.type != "cpu":
        raise UserError(
            f"{shown} is on {part.device}, but the update runs on the CPU: keep it in "
            "host memory, or use torch.optim.AdamW(fused=True)"
        )
    if not part.is_contiguous():
        raise UserError(f"{shown} has the strides {part.stride()}: make it .contiguous()")


def check_position(parameter: Tensor, contiguous: bool, moments: Moments) -> None:
    """Refuse stochastic rounding of a shard whose elements have no consecutive numbers.

    Args:
        contiguous: whether its elements are consecutive in the whole parameter.
    """
    stochastic = local(parameter.detach()).dtype != torch.float32 or (
        moments["exp_avg_sq"] != torch.float32
    )
    if stochastic and not contiguous:
        raise UserError(
            f"LayerAdam: a parameter {tuple(parameter.shape)} is cut across its rows, and "
            "stochastic rounding goes by the position in the whole: shard its first dimension, or "
            "keep it and its moments in float32"
        )


def check_gradient(parameter: Tensor) -> None:
    """Refuse a sparse gradient."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise UserError(
            f"LayerAdam: the gradient of a parameter {tuple(parameter.shape)} is sparse: "
            "build its nn.Embedding with sparse=False, or use torch.optim.SparseAdam"
        )


def check_state(
    state_dict: dict[str, Any], groups: Sequence[Group], moments: Iterable[str]
) -> None:
    """Refuse the state of another kind of optimizer, or of other groups or parameters."""
    saved = state_dict["param_groups"]
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in (saved, groups))
    if sizes != own_sizes:
        raise UserError(
            f"LayerAdam: the state is of groups of {sizes} parameters, the optimizer of "
            f"{own_sizes}: build it with the groups of the optimizer that was saved"
        )
    for i, (group, own) in enumerate(zip(saved, groups, strict=True)):
        _check_group(i, group, own)
        for number, parameter in zip(group["params"], own["params"], strict=True):
            _check_entry(number, state_dict["state"].get(number), parameter, moments)


def _check_group(i: int, group: Group, own: Group) -> None:
    missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
    if missing:
        raise UserError(
            f"LayerAdam: the state of group {i} has no {' and no '.join(missing)}, so it is not "
            "of Adam: load that of LayerAdam, torch.optim.AdamW or torch.optim.Adam"
        )
    name, own_name = group.get("name"), own.get("name")
    if None not in (name, own_name) and name != own_name:
        raise UserError(
            f"LayerAdam: group {i} of the state is the layer {name!r}, that of the optimizer "
            f"{own_name!r}: give the layers the names and the order that they were saved with"
        )
    check_settings(own | group)


def _check_entry(
    number: int, entry: dict[str, Any] | None, parameter: Tensor, moments: Iterable[str]
) -> None:
    if not entry:
        return
    missing = [name for name in ("step", *moments) if name not in entry]
    if missing:
        raise UserError(
            f"LayerAdam: the state of parameter {number} has {', '.join(entry)}, but no "
            f"{' and no '.join(missing)}: load that of LayerAdam, torch.optim.AdamW or "
            "torch.optim.Adam"
        )
    for name in moments:
        shape, own = tuple(local(entry[name]).shape), tuple(local(parameter.detach()).shape)
        if shape != own:
            raise UserError(
                f"LayerAdam: {name} of parameter {number} has the shape {shape}, the parameter "
                f"{own}: load the state of the same model, cut for the same ranks"
            )
