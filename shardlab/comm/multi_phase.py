"""Collectives over multi-phase methods."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import MessageKey
from shardlab.codecs.multi_phase import Communicator, MultiPhaseMethod, alarm
from shardlab.codecs.unit import Unit
from shardlab.comm.codec_collective import DEFAULT, CodecSettings
from shardlab.comm.collective import Collective, labelled
from shardlab.comm.ledger import Account, Kind, Ledger
from shardlab.comm.native import Native

Reduce = Callable[[Tensor, Unit, Communicator, MessageKey], Tensor]


class MultiPhaseCollective(Collective):
    """Reductions by a multi-phase method; gathers are the process group's own.

    The ledger's `encode_s` is the computation of the method, `extra_collectives` counts its phases
    after the first. Where the result is not finite (the same on all ranks) residuals do not change;
    they are named `UNIT*`.

    Args:
        method: for vectors of at least `minimum_size` elements; shorter ones are sent as float32.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: Kind,
        method: MultiPhaseMethod,
        settings: CodecSettings = DEFAULT,
    ) -> None:
        super().__init__(group, ledger, kind)
        self.method = method
        self.feedback, self.minimum_size, self._seed, _ = settings
        self._steps: Counter[str] = Counter()
        self._wire = GroupCommunicator(group, ledger, kind)
        self._native = Native(group, ledger, kind)

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        if self._is_short(vector):
            total = self._wire.sum_scatter(vector)
        else:
            total = self._reduce(self.method.sum_scatter, vector, unit)
        torch.mul(total, scale, out=output)
        self._count(raw=self._share_of_others(vector.nbytes), wire=0, collectives=0)
        self._audit(output, vector, scale)

    @labelled
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        self._count(raw=2 * self._share_of_others(vector.nbytes), wire=0, collectives=0)
        if self._is_short(vector):
            total = vector.clone()
            self._wire.sum(total)
        else:
            total = self._reduce(self.method.sum, vector, unit)
        total.mul_(scale)
        if self.ledger.audit is not None:
            end = (0, -vector.numel() % self.world_size)
            given, reduced = (torch.nn.functional.pad(each, end) for each in (vector, total))
            self._audit(self._chunks(reduced)[self.rank], given, scale)
        vector.copy_(total)

    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        self._native.all_gather(output, shard, unit)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the steps of every unit and the method's state; the same on all ranks."""
        steps = {f"step/{unit}": torch.tensor(step) for unit, step in self._steps.items()}
        return steps | {f"method/{name}": value for name, value in self.method.state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: D102
        self._steps.clear()
        self.method.reset()
        for name, value in state.items():
            what, _, rest = name.partition("/")
            if what == "step":
                self._steps[rest] = int(value)
            else:
                self.method.state[rest] = value.clone()

    def _is_short(self, vector: Tensor) -> bool:
        self._wire.begin()
        if vector.numel() >= self.minimum_size:
            return False
        self._wire.uncompressed(f"fewer than {self.minimum_size} elements")
        return True

    def _reduce(self, reduce: Reduce, vector: Tensor, unit: Unit) -> Tensor:
        part, wire, account = f"{unit.name}*", self._wire, self.account
        key = MessageKey(self._seed, self._steps[unit.name], unit.name, self.rank)
        self._steps[unit.name] += 1
        uncompressed = account.uncompressed.total()
        with self._timed("encode_s", vector), wire.coding():
            given = vector.clone() if self.feedback is None else self.feedback.given(vector, part)
            total = reduce(given, unit, wire, key)
            if self.feedback is not None:
                self.feedback.keep(part, given, alarm(total).isfinite())
        if account.uncompressed.total() == uncompressed:
            times = vector.numel() // total.numel()
            account.elements += vector.numel()
            account.elements_sent += times * self.method.elements_sent(total.numel())
        return total


class GroupCommunicator:
    """`Communicator` over a process group that counts in a ledger what it sends."""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, kind: Kind) -> None:
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._is_coding = False
        """whether the time of collectives is part of a time of coding, from which it is taken"""
        self._is_first = True
        """whether the next collective is the first one of a message"""
        self._group = group
        self._ledger = ledger
        self._kind: Kind = kind

    def begin(self) -> None:
        """Begin a message."""
        self._is_first = True

    @contextmanager
    def coding(self) -> Iterator[None]:
        """Count the block as coding, but for its collectives."""
        self._is_coding = True
        try:
            yield
        finally:
            self._is_coding = False

    def sum(self, vector: Tensor) -> None:
        """Set vector[m] to the sum over ranks: an all-reduce, 2 (W - 1) / W of its bytes."""
        with self._phase(2 * vector.nbytes * self._others(), vector):
            dist.all_reduce(vector, group=self._group)

    def largest(self, vector: Tensor) -> None:
        """Set vector[m] to the maximum over ranks; counted as metadata."""
        nbytes = 2 * vector.nbytes * self._others()
        with self._phase(nbytes, vector):
            dist.all_reduce(vector, dist.ReduceOp.MAX, group=self._group)
        self._account.metadata_bytes += nbytes

    def sum_scatter(self, vector: Tensor) -> Tensor:
        """Return the sum over ranks of chunk `rank`, for (W - 1) / W of the bytes: by the backend's
        reduce-scatter, or on gloo, whose own one sends twice as much, by an all-to-all whose owner
        sums in rank order.
        """
        if dist.get_backend(self._group) != "gloo":
            total = vector.new_empty(vector.numel() // self.world_size)
            with self._phase(vector.nbytes * self._others(), vector):
                dist.reduce_scatter_single(total, vector, group=self._group)
            return total
        taken = torch.empty_like(vector)
        with self._phase(vector.nbytes * self._others(), vector):
            dist.all_to_all_single(taken, vector, group=self._group)
        total, *others = taken.chunk(self.world_size)
        for other in others:
            total += other
        return total

    def gather(self, shard: Tensor) -> Tensor:
        """Return the shards of all ranks: an all-gather, W - 1 times the bytes of a shard."""
        taken = shard.new_empty(self.world_size * shard.numel())
        nbytes = shard.nbytes * (self.world_size - 1)
        with self._phase(nbytes, shard):
            dist.all_gather_single(taken, shard, group=self._group)
        if not shard.is_floating_point():
            self._account.index_bytes += nbytes
        return taken

    def uncompressed(self, reason: str) -> None:
        """Count a message that its method sends uncompressed."""
        self._account.uncompressed[reason] += 1

    @property
    def _account(self) -> Account:
        return self._ledger.accounts[self._kind]

    def _others(self) -> float:
        return (self.world_size - 1) / self.world_size

    @contextmanager
    def _phase(self, nbytes: float, sent: Tensor) -> Iterator[None]:
        account, is_coding, is_first = self._account, self._is_coding, self._is_first

        def read(account: Account, seconds: float) -> None:
            account.encode_s -= seconds * is_coding
            account.extra_collective_s += seconds * (not is_first)

        with (
            self._ledger.deferred.seconds(account, sent.device, read),
            self._ledger.traffic.operation(nbytes, sent.device),
        ):
            yield
        account.collectives += 1
        account.bytes_wire += nbytes
        account.extra_collectives += not is_first
        self._is_first = False
