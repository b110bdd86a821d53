"""What models return, and the loss in it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardlab.core.errors import UserError


def loss_of(output: Any) -> Tensor:
    """The loss: what is returned itself, its `loss`, or the first of several.

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
    """Whoever keeps the output after backward does not keep the graph with it."""
    if loss._base is None:  # of a view it is not ours to drop
        loss.detach_()
