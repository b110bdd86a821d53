"""Parameters of the report."""

from typing import Annotated

from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.types import Positive


class Quality(Document):
    """Points at which training curves are compared, apart from the end of the run."""

    train_loss: Annotated[tuple[Positive, ...], AS_TUPLE] = ()
    """smoothed training losses, nats per token: steps and seconds to reach each are reported"""
    val_loss: Annotated[tuple[Positive, ...], AS_TUPLE] = ()
    """losses of the validation curve, likewise; for them `train.validation` is set"""
    time_s: Annotated[tuple[Positive, ...], AS_TUPLE] = ()
    """seconds of training: the losses after each are reported"""
