"""Requirements of `SlideFSDP` of models and of what they return, each with the fix."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardlab.core.errors import UserError
from shardlab.core.torch_private import is_compiled
from shardlab.models.parts import transformer_blocks


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be streamed.

    Raises:
        UserError: in one line.
    """
    parameters = dict(model.named_parameters())
    if is_compiled(model):
        raise UserError("SlideFSDP: the model is compiled, for parameters that stay: do not")
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    if sharded or isinstance(model, DistributedDataParallel):
        raise UserError("SlideFSDP: the model is distributed already: give what was wrapped")
    if not any(p.requires_grad for p in parameters.values()):
        raise UserError("SlideFSDP: no parameter is trained: set requires_grad of some")
    if any(p.numel() > 1 and not any(p.stride()) for p in parameters.values()):
        raise UserError("SlideFSDP: the model is in another SlideFSDP already: give a new one")
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu" or parameter.dtype is not torch.float32:
            raise UserError(
                f"SlideFSDP: {name} is {parameter.dtype} on {parameter.device}: give a model in "
                "float32 on the CPU; param_dtype and device are what computes"
            )
    try:
        transformer_blocks(model)
    except UserError:
        raise UserError(
            f"SlideFSDP: {type(model).__name__} has no list of blocks (nn.ModuleList) that could "
            "be streamed: train it as it is"
        ) from None


def refuse_state_dicts(model: nn.Module) -> None:
    """Refuse the model's own state dicts: outside of their use its parameters are NaN."""

    def refuse(*_: Any) -> NoReturn:
        raise UserError(
            "state_dict: the model is in SlideFSDP, which has its parameters in host memory: take "
            "SlideFSDP.state_dict(), on all ranks; load before SlideFSDP takes the model, or "
            "continue with SlideFSDP.load(folder)"
        )

    for module in model.modules():
        module.register_state_dict_pre_hook(refuse)
        module.register_load_state_dict_pre_hook(refuse)


def loss_of(output: Any) -> Tensor:
    """Return the loss: the output itself, its `loss`, or the first of a tuple.

    Raises:
        UserError: there is none that backward could begin with.
    """
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple) and not hasattr(output, "loss"):
        loss = output[0]
    else:
        loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UserError(
            "SlideFSDP: the model returns no loss, one number that is attached to its graph: give "
            "it labels"
        )
    return loss
