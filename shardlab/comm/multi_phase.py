"""Collectives over multi-phase methods."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import MessageKey, Unit
from shardlab.codecs.multi_phase import Communicator, MultiPhaseMethod, alarm
from shardlab.comm.codec_collective import METHOD, CodecCollective, Route
from shardlab.comm.ledger import Account, Ledger, MessageKind, shares_between_nodes
from shardlab.comm.uncompressed import name_of, summed_in
from shardlab.core import torch_private
from shardlab.core.device import now

Reduce = Callable[[Tensor, Unit, Communicator, MessageKey], Tensor]


class MultiPhaseCollective(CodecCollective):
    """Reductions by a multi-phase method; gathers are uncompressed.

    The ledger's `encode_s` is the computation of the method, `extra_collectives` counts its phases
    after the first. Where the result is not finite (the same on all ranks) residuals do not change;
    they are named `UNIT*`.
    """

    unsent_part = ">0"

    def __init__(
        self, group: dist.ProcessGroup, ledger: Ledger, kind: MessageKind, route: Route
    ) -> None:
        super().__init__(group, ledger, kind, route)
        assert isinstance(route.method, MultiPhaseMethod), "other codecs have no phases"
        # a copy, since its state belongs to the units of one group
        self.method = copy.deepcopy(route.method)
        # factors and bases of other options have other shapes
        self._prefix = f"{METHOD}{self._name}/"
        self._wire = GroupCommunicator(group, ledger, kind)
        self._is_loaded = False
        """whether the method's state is where it was loaded, as checkpoints are on the host"""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the steps of every unit and the method's state; the same on all ranks."""
        methods = {self._prefix + name: value for name, value in self.method.state.items()}
        return methods | super().state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: D102
        methods = {name: value for name, value in state.items() if name.startswith(self._prefix)}
        super().load_state_dict({name: state[name] for name in state.keys() - methods.keys()})
        self.method.reset()
        for name, value in methods.items():
            self.method.state[name.removeprefix(self._prefix)] = value.clone()
        self._is_loaded = True

    def _reduce_scatter(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit, step: int
    ) -> None:
        total = self._reduce_in_phases(self.method.reduce_scatter, vector, unit, step)
        torch.mul(total, scale, out=output)
        self.account.bytes_raw += self._share_of_others(vector.nbytes)

    def _all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        step = self._begin(unit, vector)
        vector.copy_(self._reduce_in_phases(self.method.all_reduce, vector, unit, step).mul_(scale))
        self.account.bytes_raw += 2 * self._share_of_others(vector.nbytes)

    def return_compressed(self, vector: Tensor, unit: Unit) -> None:  # noqa: D102
        assert self.route.feedback is not None, "there are residuals"
        self.route.feedback.return_unapplied(f"{unit.name}*", vector)

    def _reduce_in_phases(self, reduce: Reduce, vector: Tensor, unit: Unit, step: int) -> Tensor:
        wire, account, feedback = self._wire, self.account, self.route.feedback
        key = MessageKey(self.route.seed, step, unit.name, self.rank)
        uncompressed = account.uncompressed.total()
        if self._is_loaded:
            state = self.method.state
            state.update({name: value.to(vector.device) for name, value in state.items()})
            self._is_loaded = False
        begin = now(vector.device)
        wire.begin_message()
        part = f"{unit.name}*"
        rest = vector.clone() if feedback is None else feedback.corrected(vector, part)
        total = reduce(rest, unit, wire, key)
        if feedback is not None:
            feedback.store_residual(part, rest, alarm(total).isfinite())
        account.add_time("encode_s", begin, vector.device)
        if account.uncompressed.total() == uncompressed:
            times = vector.numel() // total.numel()
            account.elements += vector.numel()
            account.elements_sent += times * self.method.elements_sent(total.numel())
        return total


class GroupCommunicator:
    """`Communicator` over a process group that counts in a ledger what it sends."""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, kind: MessageKind) -> None:
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._is_first = True
        """whether the next collective is the first one of a message"""
        self._group = group
        self._ledger = ledger
        self._kind: MessageKind = kind
        self._between_nodes = shares_between_nodes(group, ledger.ranks_per_node)

    def begin_message(self) -> None:
        """Count the next collective as the first one of a message, later ones as extra."""
        self._is_first = True

    def all_reduce(self, vector: Tensor) -> None:
        """Set vector[m] to the sum over ranks: an all-reduce, 2 (W - 1) / W of its bytes."""
        with self._phase(2 * vector.nbytes * self._others(), vector, summed_in(vector.dtype)):
            dist.all_reduce(vector, group=self._group)

    def all_reduce_max(self, vector: Tensor) -> None:
        """Set vector[m] to the maximum over ranks; counted as metadata."""
        nbytes = 2 * vector.nbytes * self._others()
        with self._phase(nbytes, vector, None):
            dist.all_reduce(vector, dist.ReduceOp.MAX, group=self._group)
        self._account.metadata_bytes += nbytes

    def reduce_scatter(self, vector: Tensor) -> Tensor:
        """Return the sum over ranks of chunk `rank`, for (W - 1) / W of the bytes: by the backend's
        reduce-scatter, or on gloo, whose own one sends twice as much, by an all-to-all whose owner
        sums in rank order.
        """
        nbytes, format = vector.nbytes * self._others(), summed_in(vector.dtype)
        if dist.get_backend(self._group) != "gloo":
            total = vector.new_empty(vector.numel() // self.world_size)
            with self._phase(nbytes, vector, format):
                torch_private.reduce_scatter_single(total, vector, group=self._group)
            return total
        received = torch.empty_like(vector)
        with self._phase(nbytes, vector, format, self._between_nodes.exchange):
            dist.all_to_all_single(received, vector, group=self._group)
        total, *others = received.chunk(self.world_size)
        for other in others:
            total += other
        return total

    def all_gather(self, shard: Tensor) -> Tensor:
        """Return the shards of all ranks: an all-gather, W - 1 times the bytes of a shard."""
        gathered = shard.new_empty(self.world_size * shard.numel())
        nbytes = shard.nbytes * (self.world_size - 1)
        with self._phase(nbytes, shard, name_of(shard.dtype)):
            torch_private.all_gather_single(gathered, shard, group=self._group)
        if not shard.is_floating_point():
            self._account.index_bytes += nbytes
        return gathered

    def report_uncompressed(self, reason: str) -> None:
        """Count a message that its method sends uncompressed."""
        self._account.uncompressed[reason] += 1

    @property
    def _account(self) -> Account:
        return self._ledger.accounts[self._kind]

    def _others(self) -> float:
        return (self.world_size - 1) / self.world_size

    @contextmanager
    def _phase(
        self, nbytes: float, sent: Tensor, format: str | None, share: float | None = None
    ) -> Iterator[None]:
        """Count a phase, which by default goes round the ranks.

        Args:
            format: of its bytes, see `Account.add_sent`.
        """
        account, begin = self._account, now(sent.device)
        with self._ledger.traffic.operation(nbytes, sent.device, self._group):
            yield
        # part of the time of the message, of which only the computation is counted
        account.add_time("encode_s", begin, sent.device, sign=-1)
        if not self._is_first:
            account.add_time("extra_collective_s", begin, sent.device)
        account.collectives += 1
        share = self._between_nodes.ring if share is None else share
        account.add_sent(nbytes, share, format)
        account.extra_collectives += not self._is_first
        self._is_first = False
