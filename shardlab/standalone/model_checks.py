"""What `SlideFSDP` refuses to train: each check raises a UserError that names the fix."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardlab.core.errors import UserError
from shardlab.models.parts import transformer_blocks


def check_model(model: Any) -> None:
    """Refuses what is no model, or none that can be taken apart."""
    if not isinstance(model, nn.Module):
        shown = model.__name__ if isinstance(model, type) else type(model).__name__
        raise UserError(f"SlideFSDP: the model is {shown}: give a torch.nn.Module")
    _check_plain(model)
    _check_parameters(model)
    try:
        transformer_blocks(model)
    except UserError:
        raise UserError(
            f"SlideFSDP: {type(model).__name__} has no list of blocks (nn.ModuleList) that could "
            "slide: train it as it is"
        ) from None


def _check_plain(model: nn.Module) -> None:
    """Wrappers hold on to parameters, which have no memory here outside of their use."""
    # what torch.compile(model) has, and what model.compile() leaves
    if hasattr(model, "_orig_mod") or any(m._compiled_call_impl for m in model.modules()):
        raise UserError("SlideFSDP: the model is compiled, for parameters that stay: do not")
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if sharded or isinstance(model, DistributedDataParallel):
        raise UserError("SlideFSDP: the model is distributed already: give what was wrapped")


def _check_parameters(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    if not parameters:
        raise UserError("SlideFSDP: the model has no parameters")
    if not any(p.requires_grad for p in parameters.values()):
        raise UserError("SlideFSDP: all parameters are frozen: set requires_grad of some")
    if any(p.numel() > 1 and not any(p.stride()) for p in parameters.values()):
        raise UserError("SlideFSDP: the model slides already: give a new one")
    if {p.dtype for p in parameters.values()} != {torch.float32}:
        raise UserError("SlideFSDP: give a model in float32; param_dtype is what computes")
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu":
            raise UserError(
                f"SlideFSDP: {name} is on {parameter.device}: load the model to the CPU"
            )


def computing_device(name: str | None, default: torch.device) -> torch.device:
    """The device of `SlideConfig.device`."""
    if name is None:
        return default
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UserError(
            f"SlideConfig.device: {name!r} is no device: 'cpu', 'cuda' or 'cuda:N'"
        ) from None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError(f"SlideConfig.device: {name}: this machine has {gpus} GPUs")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"SlideConfig.device: {name}: the engine computes on 'cpu' or 'cuda'")
    return device
