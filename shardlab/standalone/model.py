"""Requirements that `SlideFSDP` has of a model and of its outputs, each with the fix."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardlab.core.errors import UserError
from shardlab.models.parts import transformer_blocks


def check_model(model: Any) -> None:
    """Refuse what is no model, or none that can be split into blocks.

    Raises:
        UserError: in one line.
    """
    if not isinstance(model, nn.Module):
        shown = model.__name__ if isinstance(model, type) else type(model).__name__
        raise UserError(f"SlideFSDP: the model is {shown}: give a torch.nn.Module")
    _check_unwrapped(model)
    _check_parameters(model)
    try:
        transformer_blocks(model)
    except UserError:
        raise UserError(
            f"SlideFSDP: {type(model).__name__} has no list of blocks (nn.ModuleList) that could "
            "be streamed: train it as it is"
        ) from None


def _check_unwrapped(model: nn.Module) -> None:
    """Refuse wrappers: they hold on to parameters, which have no memory outside of their use."""
    # private attributes: of torch.compile(model), and of a module after model.compile()
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
        raise UserError("SlideFSDP: the model is in another SlideFSDP already: give a new one")
    if {p.dtype for p in parameters.values()} != {torch.float32}:
        raise UserError("SlideFSDP: give a model in float32; param_dtype is what computes")
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu":
            raise UserError(
                f"SlideFSDP: {name} is on {parameter.device}: load the model to the CPU"
            )


def refuse_state_dicts(model: nn.Module) -> None:
    """Refuse the model's own state dicts: outside of their use its parameters are NaN."""
    for module in model.modules():
        module.register_state_dict_pre_hook(_refuse_to_save)
        module.register_load_state_dict_pre_hook(_refuse_to_load)


def _refuse_to_save(*_: Any) -> NoReturn:
    raise UserError(
        "state_dict: the model is in SlideFSDP, which has its parameters in host memory: take "
        "SlideFSDP.state_dict(), on all ranks"
    )


def _refuse_to_load(*_: Any) -> NoReturn:
    raise UserError(
        "load_state_dict: the model is in SlideFSDP, which has its parameters in host memory: load "
        "before SlideFSDP takes the model, or continue with SlideFSDP.load(folder)"
    )


def loss_of(output: Any) -> Tensor:
    """Return the loss: the output itself, its `loss`, or the first of a tuple.

    Raises:
        UserError: there is none that backward could begin with.
    """
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple) and not hasattr(output, "loss"):
        loss = output[0] if output else None
    else:
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None:
        raise UserError("SlideFSDP: the model returns no loss: give it labels")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))
        raise UserError(f"SlideFSDP: the loss is {shown}: one number is needed (are labels given?)")
    if not loss.requires_grad:
        raise UserError("SlideFSDP: the loss is detached from the model: return it as computed")
    return loss


def drop_graph(loss: Tensor) -> None:
    """Detach the loss in place, so that a kept output does not keep the graph after backward."""
    if loss._base is None:  # a view cannot be detached in place
        loss.detach_()


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn off caches of keys and values, which training never reads."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:  # the user's model generates with them
        for config in caching:
            config.use_cache = True
