"""Settings of rare synchronisation: replicas that train alone between two of them."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shardlab.core.document import Document
from shardlab.strategy.codec_options import NoneSpec
from shardlab.strategy.codec_table import AnyCodec
from shardlab.strategy.compression import changed_settings, left_out

MINIMUM_SIZE = 1024
"""elements of a unit, fewer of which are sent uncompressed"""
_LONGEST_TRACED = 64
"""steps of a round that are traced: a trace of more would be too large"""
ENOUGH_EXCHANGES = 30
"""synchronisations of a run; after fewer an outer optimizer with momentum has not settled, and the
quality says nothing of a longer run"""
_FEW = 16
"""steps between synchronisations below which momentum would multiply steps that hardly differ"""


class Sync(Document):
    """Synchronisation of the parameters of replicas, in place of the gradients of every step."""

    elsewhere = {
        "backup_device": "state: host",
        "fragment_sync_delay": "delay",
        "fragment_update_alpha": "alpha",
        "model_fragments": "fragments",
        "outer_optimizer": "optimizer",
        "should_quantize": "codec: int8",
        "sync_every": "every",
    }
    """of torchft"""

    every: int = Field(ge=1)
    """steps between two synchronisations of a parameter"""
    optimizer: Literal["nesterov", "sgd"] = "nesterov"
    """that applies the mean outer gradient; momentum of `sgd` is the classical one"""
    learning_rate: float = Field(1.0, gt=0, le=10)
    """of the outer optimizer"""
    momentum: float | None = Field(None, ge=0, lt=1)
    """of the outer optimizer, which multiplies the step by 1 / (1 - momentum) in the long run.
    Default: 0 below 16 steps between synchronisations, else 0.5; 0.9, with learning_rate 0.7, is
    for runs of hundreds of them (Douillard et al. 2023)"""
    fragments: int = Field(1, ge=1)
    """parts of the model that are synchronised at different steps; each is made of whole units"""
    delay: int = Field(0, ge=0)
    """steps that go on while a fragment is synchronised"""
    alpha: float = Field(0.0, ge=0, lt=1)
    """share of the replica's own parameters in what it goes on with after a synchronisation"""
    warmup_steps: int = Field(0, ge=0)
    """first steps, whose gradients are reduced between replicas, by the codec of gradients there"""
    codec: AnyCodec = NoneSpec()
    """of the outer gradients"""
    error_feedback: bool = False
    """add what was not sent to the next outer gradient of the same unit"""
    decay: float = Field(1.0, gt=0, le=1)
    """factor of what was not sent, from one synchronisation to the next; 0.95 in SparseLoCo"""
    state: Literal["device", "host"] = "device"
    """memory of the outer parameters and their momentum, used at synchronisations alone"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        name, conflict = self.codec.name, self.codec.feedback_conflict()
        if self.codec.votes or self.codec.multi_phase:
            reason = "votes" if self.codec.votes else "sums in several phases"
            raise ValueError(
                f"codec {name!r} {reason}, and outer gradients need means of one message each: "
                "choose another"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"delay {self.delay} must be below every {self.every}: its synchronisation ends "
                "before its next one begins"
            )
        if self.error_feedback and (conflict or name == "none"):
            raise ValueError(conflict or "error_feedback is pointless with codec 'none'")
        if self.decay != 1 and not self.error_feedback:
            raise ValueError("decay does nothing without error_feedback: remove it")
        return self

    def canonical(self) -> Self:
        """Return the same with the momentum written out, and without an optimizer that it makes
        equal to the default."""
        momentum = self.outer_momentum()
        optimizer = self.optimizer if momentum else "nesterov"
        return self.model_copy(update={"momentum": momentum, "optimizer": optimizer})

    def written(self) -> dict[str, Any]:
        """Return a canonical form as plain data without defaults."""
        return changed_settings(self, Sync(every=self.every).canonical(), "every")

    def left_out(self, steps: int | None = None) -> str | None:
        """Return a sentence on the outer gradients that a run sends never, or None where it may
        send all.

        Args:
            steps: of the run; None: unknown.
        """
        if self.warmup_steps:
            return None
        # the last step is followed by a synchronisation
        exchanges = None if steps is None else -(-steps // self.every)
        return left_out(
            self.codec, self.error_feedback, exchanges, "synchronisation", "outer gradients"
        )

    def exchanges(self, steps: int) -> int:
        """Return the synchronisations of a run of so many steps, after its warm-up."""
        return max(0, steps - self.warmup_steps) // self.every

    def whole_rounds(self, steps: int) -> int | None:
        """Return at least so many steps, which are whole rounds of synchronisation; None
        where a round has too many to be traced."""
        return None if self.every > _LONGEST_TRACED else -(-steps // self.every) * self.every

    def outer_momentum(self) -> float:
        """Return the momentum, or its default for this number of steps between synchronisations."""
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.every < _FEW else 0.5


def repetition_steps(syncs: Sequence[Sync | None]) -> list[int]:
    """Return the steps of a repetition of each of several runs that are timed together.

    It is a round of `sync.every` steps, and of runs that reduce gradients in every step the
    shortest of these rounds: a single step between those of other runs finds its data in no cache,
    and would be compared with rounds of many steps, of which one does.
    """
    shortest = min((sync.every for sync in syncs if sync is not None), default=1)
    return [shortest if sync is None else sync.every for sync in syncs]
