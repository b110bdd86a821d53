"""Collectives over multi-phase methods."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import MessageKey
from shardlab.codecs.multi_phase import Communicator, MultiPhaseMethod, all_finite
from shardlab.codecs.unit import Unit
from shardlab.comm.collective import Collective, Native, labelled
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Account, Kind, Ledger

Reduce = Callable[[Tensor, Unit, Communicator, MessageKey], Tensor]


class MultiPhaseCollective(Collective):
    """Reductions by a multi-phase method; gathers are the process group's own.

    The ledger's `encode_s` is all that the method computes, `extra_collectives` its phases beyond
    the first. Where the result is not finite (the same on all ranks) residuals stay as they were.

    Args:
        method: for vectors of at least `minimum_size` elements; shorter ones travel as float32.
        feedback: residuals of this rank, or None: one for each unit, named `UNIT*`.
        seed: of the random numbers that all ranks share.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: Kind,
        method: MultiPhaseMethod,
        feedback: ErrorFeedback | None = None,
        minimum_size: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(group, ledger, kind)
        self.method = method
        self.feedback = feedback
        self.minimum_size = minimum_size
        self._seed = seed
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
        if self.ledger.audit is not None:
            self.ledger.audit.add(output, self._exact(vector, output.numel(), scale))

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
            padded = torch.nn.functional.pad(vector, (0, -vector.numel() % self.world_size))
            exact = self._exact(padded, padded.numel() // self.world_size, scale)
            own = total[self.rank * exact.numel() :][: exact.numel()]
            self.ledger.audit.add(own, exact[: own.numel()])
        vector.copy_(total)

    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        self._native.all_gather(output, shard, unit)

    def state_dict(self) -> dict[str, Tensor]:
        """Steps of every unit, and what the method carries on; the same on all ranks."""
        steps = {f"step/{unit}": torch.tensor(step) for unit, step in self._steps.items()}
        return steps | {f"method/{name}": value for name, value in self.method.state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from a saved state."""
        self._steps.clear()
        self.method.reset()
        for name, value in state.items():
            what, _, rest = name.partition("/")
            if what == "step":
                self._steps[rest] = int(value)
            else:
                self.method.state[rest] = value.clone()

    def _is_short(self, vector: Tensor) -> bool:
        if vector.numel() >= self.minimum_size:
            return False
        self._wire.uncompressed(f"fewer than {self.minimum_size} elements")
        return True

    def _reduce(self, reduce: Reduce, vector: Tensor, unit: Unit) -> Tensor:
        part, wire = f"{unit.name}*", self._wire
        key = MessageKey(self._seed, self._steps[unit.name], unit.name, self.rank)
        self._steps[unit.name] += 1
        wire.begin()
        phases, seconds, later = wire.phases, wire.seconds, wire.later_seconds
        reported, start = wire.reported, perf_counter()
        given = vector.clone() if self.feedback is None else self.feedback.given(vector, part)
        total = reduce(given, unit, wire, key)
        if self.feedback is not None and all_finite(total):
            self.feedback.keep(part, given)
        self.account.encode_s += perf_counter() - start - (wire.seconds - seconds)
        self.account.extra_collectives += wire.phases - phases - 1
        self.account.extra_collective_s += wire.later_seconds - later
        if wire.reported == reported:
            times = vector.numel() // total.numel()
            self.account.elements += vector.numel()
            self.account.elements_sent += times * self.method.elements_sent(total.numel())
        return total

    def _exact(self, vector: Tensor, n: int, scale: float) -> Tensor:
        """The reduce-scatter in float32; counted nowhere, since no run needs it."""
        taken = torch.empty_like(vector)
        dist.all_to_all_single(taken, vector, group=self.group)
        return taken.view(self.world_size, n).sum(0).mul_(scale)


class GroupCommunicator:
    """`Communicator` over a process group that counts in a ledger what it moves."""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, kind: Kind) -> None:
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.phases = 0
        """collectives so far"""
        self.seconds = 0.0
        """wall time in them"""
        self.later_seconds = 0.0
        """of that: in those after the first of each message"""
        self._first = 0
        self._group = group
        self._ledger = ledger
        self._kind: Kind = kind
        self._reported = 0

    @property
    def reported(self) -> int:
        """Messages so far that their method sent uncompressed."""
        return self._reported

    def begin(self) -> None:
        """The next collective is the first of a message."""
        self._first = self.phases

    def sum(self, vector: Tensor) -> None:
        """vector[m] = sum over ranks, in place: an all-reduce, 2 (W - 1) / W of its bytes."""
        with self._moving(2 * vector.nbytes * self._others()):
            dist.all_reduce(vector, group=self._group)

    def sum_scatter(self, vector: Tensor) -> Tensor:
        """The sum over ranks of chunk `rank`: an all-to-all, (W - 1) / W of the bytes.

        Summed by the owner in rank order, since gloo's own reduce-scatter moves twice as much.
        """
        taken = torch.empty_like(vector)
        with self._moving(vector.nbytes * self._others()):
            dist.all_to_all_single(taken, vector, group=self._group)
        total, *others = taken.chunk(self.world_size)
        for other in others:
            total += other
        return total

    def gather(self, shard: Tensor) -> Tensor:
        """The shards of all ranks: an all-gather, W - 1 times the bytes of a shard."""
        taken = shard.new_empty(self.world_size * shard.numel())
        nbytes = shard.nbytes * (self.world_size - 1)
        with self._moving(nbytes):
            dist.all_gather_single(taken, shard, group=self._group)
        if not shard.is_floating_point():
            self._account.index_bytes += nbytes
        return taken

    def uncompressed(self, reason: str) -> None:
        """Counts a message that its method sends as it is."""
        self._account.uncompressed[reason] += 1
        self._reported += 1

    @property
    def _account(self) -> Account:
        return self._ledger.accounts[self._kind]

    def _others(self) -> float:
        return (self.world_size - 1) / self.world_size

    @contextmanager
    def _moving(self, nbytes: float) -> Iterator[None]:
        start = perf_counter()
        with self._ledger.traffic.operation(nbytes):
            yield
        seconds = perf_counter() - start
        self.seconds += seconds
        if self.phases > self._first:
            self.later_seconds += seconds
        self.phases += 1
        self._account.collectives += 1
        self._account.bytes_wire += nbytes
