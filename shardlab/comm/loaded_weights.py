"""Weights that a script loads between two steps of replicas that train alone."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.comm.object_collectives import run_or_fail_together
from shardlab.comm.outer_parameters import OuterUnit, digest
from shardlab.core.errors import UserError


class LoadedWeights:
    """Check that an update begins with the weights that the outer parameters belong to.

    These are the weights from before the first load since the last step, so that an average may
    take their place for an evaluation, or those with which a loaded state was saved.

    Args:
        units: of the trained parameters of `model`.
        group: the replicas.
    """

    may_change = True
    """whether the outer parameters are taken from the model later than now"""

    def __init__(
        self, model: nn.Module, units: Sequence[OuterUnit], group: dist.ProcessGroup
    ) -> None:
        self._units, self._group = units, group
        self._expected: str | None = None
        """digest of the weights that the next update must find; None: not to be compared"""
        self._is_resumed = False
        """whether that is of a saved state, on all replicas"""
        # of all modules: a script may load a part of the model, or what torch.compile wraps
        self._hooks = [
            module.register_load_state_dict_pre_hook(self._before_load)
            for module in model.modules()
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # a copied or pickled model, such as an average, takes the hooks along, and is not exchanged
        return object.__new__, (LoadedWeights,)

    def forget(self) -> None:
        """Compare no more: a step has ended, or another state is loaded."""
        self._expected, self._is_resumed = None, False

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def state(self) -> Tensor:
        """Return the digest for a saved state, uint8 [8]."""
        # of a state that was loaded, whose weights may be still to come
        weights = self._expected or self._digest()
        return torch.tensor(list(bytes.fromhex(weights)), dtype=torch.uint8)

    def expect(self, state: Tensor) -> None:
        """Expect the weights of a saved state, on all replicas."""
        self._expected, self._is_resumed = bytes(state.tolist()).hex(), True

    def check(self, step: int) -> None:
        """Refuse other weights than are expected, of a saved state on all replicas at once.

        Raises:
            UserError: there are others.
        """
        if self._expected is None:
            return
        if self._is_resumed:
            failed = "sync: weights cannot be compared"
            run_or_fail_together(self._group, failed, lambda: self._refuse(step))
        else:
            self._refuse(step)
        self.forget()

    def _before_load(self, *_: object) -> None:
        if not self.may_change and self._expected is None:
            self._expected = self._digest()

    def _digest(self) -> str:
        return digest(unit.flat() for unit in self._units)

    def _refuse(self, step: int) -> None:
        if self._digest() == self._expected:
            return
        if self._is_resumed:
            raise UserError(
                f"sync: the weights are not those of step {step}, with which the handle's state "
                "was saved: load each rank's into the wrapped model (DistributedDataParallel sends "
                "those of rank 0 to all); for handle.exchanged_state_dict() as the model, load "
                "shardlab.merge_states of all ranks"
            )
        raise UserError(
            f"sync: weights were loaded after step {step}, and exchanges would undo that: load "
            "the handle's state of the same step, too, or detach() and attach again "
            "(DistributedDataParallel: to a new wrapper)"
        )
