"""Contract of collectives, and the contract of modules that use them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from shardlab.codecs.unit import Unit
from shardlab.comm.ledger import Account, Coding, Kind, Ledger, Timer
from shardlab.comm.transport import Transport
from shardlab.core.device import accelerator_of
from shardlab.profiling.labels import COMMUNICATION

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Future = torch.futures.Future[list[Tensor]]


def labelled(method: _Method) -> _Method:
    """Label the method in profiles with the name of its unit, the last argument."""

    @wraps(method)
    def call(*args: Any) -> Any:
        with record_function(COMMUNICATION + args[-1].name):
            return method(*args)

    return cast(_Method, call)


class FutureWork(dist.Work):
    """Work that ends with a future, whose value is a list of results as in torch."""

    def __init__(self, future: _Future) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; raise the error of the operation. The group's timeout applies."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has ended."""
        return self._future.done()

    def get_future(self) -> _Future:
        """Return the future."""
        return self._future


class CompletedWork(FutureWork):
    """Work of an operation that was completed (on a GPU: issued) before it is returned."""

    def __init__(self, result: Tensor) -> None:
        future: _Future = torch.futures.Future()
        future.set_result([result])
        super().__init__(future)


class Collective(ABC):
    """reduce-scatter, all-reduce and all-gather of float vectors over one process group.

    Laws:
    - all ranks hold the same bytes of a result that several of them hold;
    - the ledger counts, under `kind`, the bytes that this rank sends to others;
    - a message belongs to a `unit`, which is the same on all ranks and in all steps;
    - `start_*` followed by `wait()` has the bits and the counts of the blocking form;
    - profiles show the unit of an operation, where a method is `labelled`.

    Between `start_*` and the end of `wait()` callers must not use the tensors. All ranks start the
    collectives of one group in the same order.
    """

    elementwise: ClassVar[bool] = False
    """whether all_reduce treats elements independently: the grouping into messages may change"""
    ranks_per_node: int = 0
    """of a two-level collective; 0 for one level"""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, kind: Kind) -> None:
        self.group = group
        self.ledger = ledger
        self.kind = kind
        self.transport = Transport(group, ledger.traffic)
        self.world_size = self.transport.world_size
        self.rank = self.transport.rank

    @property
    def account(self) -> Account:
        """Counts of the messages of this collective's kind."""
        return self.ledger.accounts[self.kind]

    @abstractmethod
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        """Set output[n] to scale * sum over ranks of chunk `rank` of vector[world_size * n]."""

    @abstractmethod
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """Set vector[n] to scale * sum over ranks of vector, in place."""

    @abstractmethod
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """Set output[world_size * n] to the concatenated shards[n] of all ranks.

        `shard` may be this rank's part of `output`.
        """

    def start_reduce_scatter(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit
    ) -> dist.Work:
        """Start `reduce_scatter`; by default it is completed on return."""
        self.reduce_scatter(output, vector, scale, unit)
        return CompletedWork(output)

    def start_all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> dist.Work:
        """Start `all_reduce`; by default it is completed on return."""
        self.all_reduce(vector, scale, unit)
        return CompletedWork(vector)

    def start_all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> dist.Work:
        """Start `all_gather`; by default it is completed on return."""
        self.all_gather(output, shard, unit)
        return CompletedWork(output)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that later messages depend on, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Continue from `state_dict()`."""

    def _count(self, raw: float, wire: float, collectives: int = 1) -> None:
        account = self.account
        account.collectives += collectives
        account.bytes_raw += raw
        account.bytes_wire += wire

    def _share_of_others(self, nbytes: int) -> float:
        """Return (W-1)/W of a full vector: what a reduce-scatter or all-gather sends per rank."""
        return nbytes * (self.world_size - 1) / self.world_size

    def _chunks(self, vector: Tensor) -> list[Tensor]:
        """Return the W equal parts of a vector."""
        return list(vector.view(self.world_size, vector.numel() // self.world_size).unbind())

    def _check_finite(self, reduced: Tensor) -> None:
        """Count a result of decoded payloads with a NaN or an infinity."""
        self.ledger.deferred.value(self.account, _alarm(reduced), _count_not_finite)

    def _timed(self, what: Coding, like: Tensor) -> Timer:
        """Add the time of the block, on the device of a tensor, to the account."""
        return self.ledger.timed(self.account, what, like.device)

    def _audit(self, reduced: Tensor, vector: Tensor, scale: float) -> None:
        """While auditing, compare a reduction with the exact one, whose bytes are not counted.

        Args:
            reduced: this rank's shard of the sum.
            vector: input of this rank, [world_size * n].
        """
        if self.ledger.audit is None:
            return
        chunks, exact = self._chunks(vector), torch.empty_like(reduced)
        parts = [torch.empty_like(chunk) for chunk in chunks]
        parts[self.rank] = chunks[self.rank]
        self.transport.exchange(chunks, parts)
        add_up(parts, exact, scale)
        self.ledger.audit.add(reduced, exact)


def add_up(parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """Write scale * (part 0 + part 1 + ...) to `out`, summed in this order in float32.

    The order is fixed since float32 sums depend on it and all ranks need the same bits.
    """
    if out.dtype != torch.float32:
        total = torch.empty_like(out, dtype=torch.float32)
        add_up([part.float() for part in parts], total, scale)
        out.copy_(total)
        return
    first, *others = parts
    if not others:
        torch.mul(first, scale, out=out)
        return
    torch.add(first, others[0], out=out)
    for part in others[1:]:
        out.add_(part)
    if scale != 1:
        out.mul_(scale)


def _alarm(vector: Tensor) -> Tensor:
    """Return a number that is finite if all elements of a vector are: [] on its device."""
    # on a CPU a sum takes a third of the time of a norm, but that of finite elements may overflow
    if accelerator_of(vector.device) is None and math.isfinite((total := vector.sum()).item()):
        return total
    # the largest magnitude: NaN with a NaN; nothing overflows and no temporary is needed
    largest: Tensor = torch.linalg.vector_norm(vector, math.inf)
    return largest


def _count_not_finite(account: Account, found: float) -> None:
    account.not_finite += not math.isfinite(found)


MakeCollective = Callable[[dist.ProcessGroup], Collective]


class Attachable(ABC):
    """Module whose collectives `attach` can replace without an import of its class."""

    @abstractmethod
    def attach_collectives(
        self, gradients: MakeCollective, weights: MakeCollective, replicas: MakeCollective
    ) -> Callable[[], None]:
        """Use these collectives for the module's process groups; return a function that undoes it.

        Args:
            replicas: of gradients, between replicas of the model.
        """

    @abstractmethod
    def unit_names(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each unit, which is sent as one flat vector."""
