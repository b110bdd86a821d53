"""Handle that `attach` returns: ledger, state, detaching."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardlab.comm.background import Lanes
from shardlab.comm.collective import Collective, MakeCollective
from shardlab.comm.feedback import ErrorFeedback, Updates
from shardlab.comm.ledger import Ledger
from shardlab.comm.residual_merging import State, merge_residuals
from shardlab.core.errors import UserError

RESIDUALS = "gradients.residual."
"""beginning of the names of residuals in a state, after the rank"""
_COUNT = "gradients.residuals"
"""number of residuals, since some loaders of checkpoints skip what a new state does not name yet"""


@dataclass(eq=False)
class PerGroup:
    """Collectives for one purpose, each made when its process group is first used."""

    _purpose: str
    _make: MakeCollective
    _made: dict[dist.ProcessGroup, Collective] = field(default_factory=dict)
    _loaded: State = field(default_factory=dict)

    def __call__(self, group: dist.ProcessGroup) -> Collective:
        """Return the collective of `group`."""
        if group not in self._made:
            prefix = self._prefix(len(self._made))
            self._made[group] = self._make(group)
            self._made[group].load_state_dict(_below(prefix, self._loaded))
        return self._made[group]

    def state_dict(self) -> State:
        """Return the states of all collectives, in the order in which their groups were used."""
        return {
            self._prefix(index) + key: tensor
            for index, collective in enumerate(self._made.values())
            for key, tensor in collective.state_dict().items()
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`, for groups that are used later, too."""
        self._loaded = state
        for index, collective in enumerate(self._made.values()):
            collective.load_state_dict(_below(self._prefix(index), state))

    def _prefix(self, index: int) -> str:
        return f"{self._purpose}.group{index}."


@dataclass(eq=False)
class Handle:
    """Ledger, residuals and state of an attached model, and the function that detaches it."""

    ledger: Ledger
    feedback: ErrorFeedback | None
    _stateful: Sequence[PerGroup | Updates]
    _listeners: Sequence[ErrorFeedback | Updates]
    _lanes: Lanes | None
    _detach: Callable[[], None]

    def drain(self) -> None:
        """With `overlap`: wait until all gradients are reduced; raise errors of communication."""
        if self._lanes is not None:
            self._lanes.drain()

    def step_ended(self) -> None:
        """Note that the parameters are updated; call it where no optimizer of torch does that."""
        for each in self._listeners:
            each.step_ended()

    def rollback(self) -> None:
        """Roll back error feedback to the last update of the parameters.

        Call it on all ranks when a gradient is discarded because it is not finite: what was sent
        for it was not applied.
        """
        if self.feedback is not None:
            self.feedback.rollback()

    def detach(self) -> None:
        """Restore the communication of the model; the ledger keeps its counts."""
        self._detach()

    def state_dict(self) -> State:
        """Return this rank's residuals and counters, to be saved with its checkpoint.

        A flat mapping of names to tensors, none of which is written to later. All names begin with
        the rank, because torch.distributed.checkpoint saves what has one name once for all ranks.

        Raises:
            PayloadError: a message since the last one was damaged, which a device reports late.
        """
        self.ledger.deferred.settle()
        state: State = {}
        if self.feedback is not None:
            residuals = self.feedback.state_dict()
            state = {RESIDUALS + name: tensor for name, tensor in residuals.items()}
            state[_COUNT] = torch.tensor(len(residuals))
        for each in self._stateful:
            state |= each.state_dict()
        rank = _of_rank(dist.get_rank())
        return {rank + name: tensor.clone() for name, tensor in state.items()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()` of the same rank, or from `merge_states`.

        Raises:
            UserError: it is of another rank or lacks residuals, or it holds some, but there is no
                error feedback.
        """
        state = _own(state, dist.get_rank())
        residuals = _below(RESIDUALS, state)
        expected = int(state.get(_COUNT, len(residuals)))
        if len(residuals) != expected:
            raise UserError(
                f"the state holds {len(residuals)} of {expected} residuals: a new handle names "
                "none before its first step, so take the names from the checkpoint's metadata "
                "(docs/how-to/your-own-model.md)"
            )
        if self.feedback is not None:
            self.feedback.load_state_dict(residuals)
        elif residuals:
            raise UserError(
                "the state holds residuals: attach with error_feedback=True, or remove its keys "
                f"with {_COUNT[:-1]!r}"
            )
        for each in self._stateful:
            each.load_state_dict(state)


def merge_states(
    states: Sequence[State], world_size: int, rank: int, ranks_per_node: int | None = None
) -> State:
    """Return the state for `rank` of `world_size`, from `Handle.state_dict()` of all old ranks.

    Residuals are merged (`shardlab.comm.residuals`), counters are the same on all ranks. State of
    multi-phase methods is dropped, since it depends on the old layout.

    Args:
        ranks_per_node: size of the new nodes, where there are two levels; by default as before.

    Raises:
        UserError: a state is missing, a residual has no layout or is of a two-dimensional mesh, or
            the new ranks are not whole nodes.
    """
    if not states:
        raise UserError("merge_states: give the states of all old ranks, in their order")
    states = [_own(state, old) for old, state in enumerate(states)]
    residuals = merge_residuals(
        [_below(RESIDUALS, s) for s in states], world_size, rank, ranks_per_node
    )
    merged = {
        name: tensor
        for name, tensor in states[0].items()
        if not name.startswith(RESIDUALS) and ".method/" not in name and tensor.numel() == 1
    }
    merged |= {RESIDUALS + name: tensor for name, tensor in residuals.items()}
    if _COUNT in merged:
        merged[_COUNT] = torch.tensor(len(residuals))
    return {_of_rank(rank) + name: tensor for name, tensor in merged.items()}


def _of_rank(rank: int) -> str:
    return f"rank{rank}."


def _own(state: State, rank: int) -> State:
    """Return the part of a state that is of `rank`, by names without it."""
    own = _below(_of_rank(rank), state)
    if state and not own:
        raise UserError(
            f"the state has {next(iter(state))!r} and nothing of rank {rank}: give each rank its "
            "own, or for other ranks what shardlab.merge_states makes of all states in their order"
        )
    return own


def _below(prefix: str, state: State) -> State:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
