"""Handle that `attach` returns, and the merging of its state for another number of ranks.

The applied mean of W ranks is (1/W) * sum over ranks r of D(C(g_r + e_r)), so the residuals still
owe (1/W) * sum of e_r to the parameters. On W' ranks the same is owed if

    (1/W') * sum over r' of e'_r' = (1/W) * sum over r of e_r,

which holds for e'_r' = (1/W) * sum over r of e_r on every new rank. The residual of an owner's mean
(part `unit<`) is owed as it is: shards are concatenated and cut for the new ranks.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.comm.background import Lanes
from shardlab.comm.collective import REPLICAS, Collective
from shardlab.comm.exchanges import below, check_residuals
from shardlab.comm.feedback import (
    ACROSS,
    LAYOUT,
    Draws,
    ErrorFeedback,
    ResidualLayout,
    widen,
)
from shardlab.comm.ledger import Ledger
from shardlab.comm.outer_parameters import outer_state
from shardlab.comm.rare_sync import BETWEEN_EXCHANGES, RareSync
from shardlab.comm.routes import Collectives
from shardlab.core.errors import UserError

StateDict = dict[str, Tensor]

RESIDUALS = "gradients.residual."
"""beginning of the names of residuals in a state, after the rank"""
_SUFFIX = re.compile("[#@]")
"""begins what follows the name of a unit: the trained part, replicas, the second level"""
_COUNT = "gradients.residuals"
"""number of residuals, since some loaders of checkpoints skip what a new state does not name yet"""
_REMOVE = "remove its keys with 'gradients.residual'"
"""how to go on without residuals: their number goes with them"""


@dataclass(eq=False)
class Handle:
    """Ledger, residuals and state of an attached model, and the function that detaches it."""

    ledger: Ledger
    feedback: ErrorFeedback | None
    _draws: Draws | None
    """where gathered parameters are compressed"""
    _collectives: Collectives
    _units: frozenset[str] | None
    """names of the units, where they are known before the first step"""
    _lanes: Lanes | None
    _detach: Callable[[], None]
    _sends: bool
    """whether gradients are sent, if only to this rank itself; FSDP leaves that out"""
    _sync: RareSync | None = None

    def __str__(self) -> str:
        """Say in one line what this rank has sent, what compression saved, and what it left out."""
        gradients, weights = (self.ledger.accounts[kind] for kind in ("gradients", "weights"))
        left_out = self._draws is None and weights.bytes_wire > 0
        # who compresses nothing measures what others are compared with
        compresses = gradients.bytes_wire < 0.99 * gradients.bytes_raw
        hint = ": add weights='int8'" if left_out and compresses else ""
        apart = "" if self._sync is None else self._sync.apart()
        return "; ".join(filter(None, [f"{self.ledger}{hint}", self._in_place(), apart]))

    def __repr__(self) -> str:
        """Return the printed line, which a notebook shows."""
        return str(self)

    def _in_place(self) -> str:
        """Say what synchronisation is in place of."""
        steps = 0 if self._sync is None else self._sync.step
        nbytes = steps * self.ledger.gradients_of_step
        factor, unit = (1e6, "MB") if nbytes >= 1e6 else (1e3, "kB")
        size = f"{nbytes / factor:,.1f} {unit}"
        return f"in place of {size} of gradients in {steps} steps" if nbytes else ""

    def metrics(self) -> dict[str, float]:
        """Return what this rank has sent, and what it knows of error feedback and replicas.

        A flat mapping of names to numbers, which trackers take as it is, such as
        `run.log(handle.metrics(), step=step)`. Counts and seconds are totals since `attach`, or
        `ledger.reset()`. Nothing is sent, so any rank may call it alone; on a GPU the host waits
        for the steps so far.
        """
        metrics = self.ledger.metrics()
        if self.feedback is not None:
            metrics["comm/residual_norm"] = self.feedback.norm()
        if self._sync is not None:
            metrics |= self._sync.metrics()
        return metrics

    def step(self) -> None:
        """End an iteration, after the update of the parameters, also where that was left out.

        With `sync`, and without `optimizer`, all ranks call it once per iteration, however
        many updates that has: it synchronises what is due between replicas. Else it is needed where
        the optimizer has other tensors than the model's parameters, such as copies in float32, for
        `rollback`.
        """
        if self._sync is not None and self._sync.is_counted:
            raise UserError("handle.step() counts what optimizer= counts already: remove one")
        if self.feedback is not None:
            self.feedback.end_step()
        if self._sync is not None:
            self._sync.end_step()

    def synchronize(self) -> None:
        """Average the replicas, at the end of training or before `detach`; they are then equal."""
        if self._sync is not None:
            self._sync.synchronize()

    def exchanged_state_dict(self) -> StateDict:
        """Return the model's state as all replicas know it, at any time: that of the outer
        optimizer. Sharded parameters are DTensors.

        Raises:
            UserError: there is no `sync`: save `model.state_dict()`.
        """
        if self._sync is None:
            raise UserError("handle: replicas are equal without sync: save model.state_dict()")
        return self._sync.exchanged_state_dict()

    def exchanged_parameters(self) -> dict[nn.Parameter, Tensor]:
        """Return what all replicas agree on in place of each trained parameter."""
        return {} if self._sync is None else self._sync.exchanged_parameters()

    def wait(self) -> None:
        """Wait until all messages under way have arrived; raise errors of communication.

        Backward waits for the reductions of `overlap`, unless it fails, and a later step for what
        replicas send with a `delay`.
        """
        if self._lanes is not None:
            self._lanes.wait()
        if self._sync is not None:
            self._sync.wait()

    def rollback(self) -> None:
        """Restore error feedback as it was before the first gradient of the last step.

        Call it on all ranks when gradients that backward has made are discarded because they are
        not finite, also by `torch.amp.GradScaler`, which then lowers its scale: what was sent for
        them was not applied. It does nothing a second time.
        """
        if self.feedback is not None:
            self.feedback.rollback()

    def detach(self) -> None:
        """Restore the communication of the model, on all ranks; the ledger keeps its counts.

        Replicas that have trained alone since the last synchronisation stay apart, with a warning.
        Process groups that `attach` has made are left to the next one, since a sweep in one process
        attaches often.
        """
        self._detach()

    def state_dict(self) -> StateDict:
        """Return this rank's residuals and counters, to be saved with its checkpoint.

        A flat mapping of names to tensors, none of which is written to later. All names begin with
        the rank, because torch.distributed.checkpoint saves what has one name once for all ranks.
        """
        state: StateDict = {}
        if self.feedback is not None:
            residuals = self.feedback.state_dict()
            state = {RESIDUALS + name: tensor for name, tensor in residuals.items()}
            state[_COUNT] = torch.tensor(len(residuals))
        for prefix, stateful in self._stateful():
            state |= {prefix + name: tensor for name, tensor in stateful.state_dict().items()}
        if self._sync is not None:
            state |= self._sync.state_dict()
        rank = dist.get_rank()
        return {f"rank{rank}.{name}": tensor.clone() for name, tensor in state.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from `state_dict()` of the same rank, or from `merge_states`.

        Raises:
            UserError: it is of another rank, of other units or of another method of several phases,
                it lacks residuals, or it holds some, but there is no error feedback.
        """
        state = _part_of(state, dist.get_rank())
        has_feedback = self.feedback is not None
        residuals = check_residuals(state, RESIDUALS, _COUNT, has_feedback, f", or {_REMOVE}")
        if not self._sends and any(REPLICAS not in name for name in residuals):
            raise UserError(
                "the state holds residuals, and on one rank fully_shard sends no gradients that "
                f"they could be added to: {_REMOVE}, or use DistributedDataParallel"
            )
        for name in below(LAYOUT, residuals):
            if self._units is not None and _SUFFIX.split(name)[0] not in self._units:
                raise UserError(
                    f"the state holds the residual of {name!r}, the model has "
                    f"{', '.join(sorted(self._units))}: wrap it as it was, or {_REMOVE}"
                )
        if self.feedback is not None:
            self.feedback.load_state_dict(residuals)
        for prefix, stateful in self._stateful():
            stateful.load_state_dict(below(prefix, state))
        if self._sync is not None:
            self._sync.load_state_dict(state)
        elif any(name.startswith(BETWEEN_EXCHANGES) for name in state):
            raise UserError("the state is of replicas that train alone: attach with sync")

    def _stateful(self) -> Iterator[tuple[str, Collective | Draws]]:
        """Yield what else has a state, with the beginning of its names in that of the handle."""
        for purpose, by_group in self._collectives.by_purpose.items():
            for index, collective in enumerate(by_group.values()):
                yield f"{purpose}.group{index}.", collective
        if self._draws is not None:
            yield "", self._draws


def merge_states(
    states: Sequence[StateDict], world_size: int, rank: int, ranks_per_node: int | None = None
) -> StateDict:
    """Return the state for `rank` of `world_size`, from `Handle.state_dict()` of all old ranks.

    Residuals are merged, in float32; counters are the same on all ranks, the outer momentum of
    `sync` on all replicas. State of multi-phase methods is dropped, since it depends on the
    old layout, and what is of one replica alone.

    Args:
        ranks_per_node: size of the new nodes, where there are two levels; by default as before.

    Raises:
        UserError: a state is missing, a residual is of a two-dimensional mesh, or the new ranks are
            not whole nodes.
    """
    if not states:
        raise UserError("merge_states: give the states of all old ranks, in their order")
    states = [_part_of(state, old) for old, state in enumerate(states)]
    merged = {
        name: tensor
        for name, tensor in states[0].items()
        if not name.startswith((RESIDUALS, BETWEEN_EXCHANGES))
        and ".method/" not in name
        and tensor.numel() == 1
    }
    merged |= outer_state(states, rank)
    residuals: StateDict = {}
    stored = [below(RESIDUALS, state) for state in states]
    if any(name.endswith(REPLICAS) for name in stored[0]):
        raise UserError(
            "merge_states: residuals of a two-dimensional mesh fit the same mesh alone: continue "
            "with it, or remove the keys with 'gradients.residual' from the states"
        )
    for name, tensor in stored[0].items():
        if name.startswith(LAYOUT):
            unit, old = name.removeprefix(LAYOUT), ResidualLayout.of(tensor)
            new = _new_layout(unit, old, len(states), world_size, ranks_per_node)
            residuals |= _merge_unit(stored, unit, old, new, rank)
            residuals[name] = new.tensor()
    if _COUNT in merged:
        merged[_COUNT] = torch.tensor(len(residuals))
    merged |= {RESIDUALS + name: tensor for name, tensor in residuals.items()}
    return {f"rank{rank}.{name}": tensor for name, tensor in merged.items()}


def _new_layout(
    unit: str, old: ResidualLayout, states: int, world_size: int, ranks_per_node: int | None
) -> ResidualLayout:
    if old.world_size != states:
        raise UserError(
            f"merge_states: {unit!r} was shared by {old.world_size} ranks, but there are {states} "
            "states: give those of all ranks, in their order"
        )
    node = (ranks_per_node or old.ranks_per_node) if old.ranks_per_node else 0
    if node and world_size % node:
        raise UserError(
            f"merge_states: {world_size} ranks are not whole nodes of {node}: give ranks_per_node"
        )
    return old._replace(world_size=world_size, ranks_per_node=node)


def _part_of(state: StateDict, rank: int) -> StateDict:
    """Return the part of a state that is of `rank`, by names without it."""
    of_rank = below(f"rank{rank}.", state)
    if state and not of_rank:
        raise UserError(
            f"the state has {next(iter(state))!r} and nothing of rank {rank}: give each rank its "
            "own, or for other ranks what shardlab.merge_states makes of all states in their order"
        )
    return of_rank


def _merge_unit(
    states: Sequence[StateDict], unit: str, old: ResidualLayout, new: ResidualLayout, rank: int
) -> StateDict:
    """Return the residuals of a unit for `rank` of the new layout.

    One level is one node of all ranks, without a second level.
    """
    size = old.ranks_per_node or old.world_size
    new_size = new.ranks_per_node or new.world_size
    nodes, across = old.world_size // size, unit + ACROSS
    first, merged = states[0], dict[str, Tensor]()
    if f"{unit}>0" in first:
        sums = [_mean([state[f"{unit}>{to}"] for state in states]) for to in range(size)]
        vectors = _by_local_rank(_cut(_by_rank(sums, nodes), old, new), new_size)
        for to, vector in enumerate(vectors):
            merged[f"{unit}>{to}"] = vector
    if f"{unit}<" in first:
        shards = [widen(state[f"{unit}<"]) for state in states[:size]]
        vectors = _by_local_rank(_cut(_by_rank(shards, nodes), old, new), new_size)
        merged[f"{unit}<"] = vectors[rank % new_size]
    if f"{unit}*" in first:
        vector = _mean([state[f"{unit}*"] for state in states])
        if old.scattered:
            vector = torch.cat(_cut(vector.chunk(old.world_size), old, new))
        merged[f"{unit}*"] = vector
    if f"{across}>0" in first:
        # the mean over nodes of one local rank is L times what it owes, before and after
        chunks = [
            _mean([state[f"{across}>{node}"] for state in states[local_rank::size]]) / size
            for node in range(nodes)
            for local_rank in range(size)
        ]
        for node, chunk in enumerate(_cut(chunks, old, new)[rank % new_size :: new_size]):
            merged[f"{across}>{node}"] = chunk * new_size
    if f"{across}<" in first:
        shards = _cut([widen(state[f"{across}<"]) for state in states], old, new)
        merged[f"{across}<"] = shards[rank].clone()
    return merged


def _mean(residuals: Sequence[Tensor]) -> Tensor:
    """Return the mean of stored residuals in float32, summed in float64."""
    total = widen(residuals[0]).double()
    for stored in residuals[1:]:
        total += widen(stored)
    return (total / len(residuals)).float()


def _cut(chunks: Sequence[Tensor], old: ResidualLayout, new: ResidualLayout) -> list[Tensor]:
    return new.chunks_of(old.blocks_of(chunks))


def _by_rank(vectors: Sequence[Tensor], nodes: int) -> list[Tensor]:
    """Return chunks in the order of ranks, from one vector [nodes * n] per rank of a node."""
    rows = [vector.chunk(nodes) for vector in vectors]
    return [row[node] for node in range(nodes) for row in rows]


def _by_local_rank(chunks: Sequence[Tensor], size: int) -> list[Tensor]:
    """Return one vector [nodes * n] per rank of a node of `size`, from chunks by rank."""
    return [torch.cat(list(chunks[local_rank::size])) for local_rank in range(size)]
