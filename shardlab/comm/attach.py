"""One call that compresses the gradients of somebody else's FSDP2 or DDP model."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardlab.codecs.base import Codec
from shardlab.codecs.registry import make_codec
from shardlab.comm.collective import Collective, Native
from shardlab.comm.ddp_hooks import attach_ddp
from shardlab.comm.exchange import Exchange
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.fsdp2_hooks import attach_fsdp2
from shardlab.comm.ledger import Ledger
from shardlab.core.errors import UserError

Spec = str | Mapping[str, Any] | BaseModel | Codec


class Handle:
    """What `attach` returns: the ledger, the residuals, and the way out."""

    def __init__(
        self, ledger: Ledger, feedback: ErrorFeedback | None, detach: Callable[[], None]
    ) -> None:
        self.ledger = ledger
        self.feedback = feedback
        self._detach = detach

    def detach(self) -> None:
        """The model communicates as it did before; the ledger keeps its counts."""
        self._detach()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's residuals, to be saved with the checkpoint of the same rank."""
        return self.feedback.state_dict() if self.feedback else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from saved residuals."""
        if self.feedback is not None:
            self.feedback.load_state_dict(state)


def attach(
    model: nn.Module,
    gradients: Spec = "none",
    *,
    error_feedback: bool = False,
    route: Literal["native", "exchange"] | None = None,
    minimum_size: int = 1024,
) -> Handle:
    """Sends the gradients of `model` through a codec and counts every byte.

    Args:
        model: wrapped by `fully_shard` or DistributedDataParallel.
        gradients: codec by name with options (`"int8:group=64"`), as a mapping, or as an object.
        error_feedback: what was not sent is added to the next gradient of the same unit.
        route: native (the group's own collective) or exchange (all-to-all of payloads); by default
            native for `none` and exchange for the others.
        minimum_size: messages with fewer elements travel uncompressed; the ledger says so.

    Raises:
        UserError: the model is wrapped by neither, or codec and route do not fit.
    """
    codec = make_codec(gradients)
    native = codec.name == "none" if route is None else route == "native"
    if native and codec.name != "none":
        raise UserError(f"codec {codec.name!r} cannot be summed on the wire: use route='exchange'")
    ledger = Ledger()
    feedback = ErrorFeedback() if error_feedback else None
    collectives: dict[dist.ProcessGroup, Collective] = {}

    def for_gradients(group: dist.ProcessGroup) -> Collective:
        if group not in collectives:
            collectives[group] = (
                Native(group, ledger, "gradients")
                if native
                else Exchange(group, ledger, "gradients", codec, feedback, minimum_size)
            )
        return collectives[group]

    def for_weights(group: dist.ProcessGroup) -> Native:
        return Native(group, ledger, "weights")

    if isinstance(model, FSDPModule):
        detach = attach_fsdp2(model, for_gradients, for_weights)
    elif isinstance(model, DistributedDataParallel):
        detach = attach_ddp(model, for_gradients)
    else:
        raise UserError(
            f"attach: {type(model).__name__} is neither wrapped by fully_shard nor by "
            "DistributedDataParallel: wrap it first"
        )
    return Handle(ledger, feedback, detach)
