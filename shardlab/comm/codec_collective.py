"""Base of collectives that compress: what is compressed, what is sent uncompressed, and why."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Block, Unit
from shardlab.comm.collective import Collective, labelled
from shardlab.comm.feedback import ErrorFeedback, Layout, Updates
from shardlab.comm.ledger import Kind, Ledger
from shardlab.comm.uncompressed import uncompressed

BY_NAME = "excluded by name"
WARM_UP = "warm-up"
NO_GRADIENT = "a parameter without gradient"
_MESSAGES = "messages:"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class CodecSettings(NamedTuple):
    """Settings that all collectives with a codec or a multi-phase method share."""

    feedback: ErrorFeedback | None = None
    """residuals of this rank"""
    minimum_size: int = 0
    """messages of fewer elements are sent uncompressed"""
    seed: int = 0
    """of random codecs; the same on all ranks"""
    updates: Updates | None = None
    """of the parameters that are sent: all messages of a unit between two updates use the same
    random numbers; without it every message has new ones"""
    excluded: frozenset[str] = frozenset()
    """names of blocks that are sent uncompressed"""
    warmup: int = 0
    """messages of each unit, from the start, that are sent uncompressed"""


DEFAULT = CodecSettings()


class CodecCollective(Collective):
    """Collective that compresses messages, except those that are sent uncompressed.

    Uncompressed are, in this order, each counted in the ledger with its reason: messages of other
    types than float32, bf16 and fp16; messages without the gradients of some parameters of the
    unit; the first `warmup` messages of a unit; excluded blocks, which are taken out of the message
    and sent as a separate one; messages of fewer than `minimum_size` elements. Codecs take float32:
    narrower messages are widened for them, and have residuals in float32.

    Subclasses compress float32 vectors in `_reduce_scatter`, `_all_reduce` and `_all_gather`; these
    also get vectors below the minimum size, of any type, and send them by `_exact`.
    """

    ranks_per_node = 0
    """of a two-level collective; 0 for one level"""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: Kind,
        settings: CodecSettings = DEFAULT,
        extra: bool = False,
    ) -> None:
        super().__init__(group, ledger, kind, extra)
        self.feedback, self.minimum_size, self._seed, self._updates = settings[:4]
        self._excluded, self._warmup = settings.excluded, settings.warmup
        self._exact = uncompressed(group, ledger, kind, extra)
        self._extra_exact = uncompressed(group, ledger, kind, extra=True)
        self._messages: Counter[str] = Counter()
        """of the warm-up, by unit"""
        self._laid_out: set[tuple[str, int]] = set()

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        self._reduce(output, vector, scale, unit, True)

    @labelled
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        self._reduce(vector, vector, scale, unit, False)

    @labelled
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        if self._bypasses(unit, shard.numel(), self.world_size, shard.dtype):
            self._exact.all_gather(output, shard, unit)
        elif self._is_wide(output):
            self._all_gather(output, shard, unit)
        else:
            result = torch.empty_like(output, dtype=torch.float32)
            with self._raw_bytes_of(shard):
                self._all_gather(result, shard.float(), unit)
            output.copy_(result)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of messages of each unit in the warm-up; the same on all ranks."""
        return {_MESSAGES + unit: torch.tensor(n) for unit, n in self._messages.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: D102
        self._messages = Counter(
            {
                name.removeprefix(_MESSAGES): int(n)
                for name, n in state.items()
                if name.startswith(_MESSAGES)
            }
        )

    @abstractmethod
    def _reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        """Write this rank's shard of the sum, times `scale`, to `output`."""

    def _all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """Reduce-scatter, then all-gather the sums, by default."""
        padded = self._padded(vector)
        shard = padded.new_empty(padded.numel() // self.world_size)
        self._reduce_scatter(shard, padded, scale, unit)
        self._all_gather(padded, shard, unit)
        if padded is not vector:
            vector.copy_(padded[: vector.numel()])

    @abstractmethod
    def _all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """Write the shards of all ranks to `output`."""

    def _reduce(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit, scatter: bool
    ) -> None:
        """Reduce-scatter, or all-reduce with `vector` as the output, what is compressed or not."""
        n = output.numel()
        chunks = self.world_size if scatter else 1
        if self._bypasses(unit, n, chunks, vector.dtype):
            _reduce_by(self._exact, output, vector, scale, unit, scatter)
        elif self._excluded and (parts := self._parts(unit, chunks)):
            # excluded blocks are an extra message where others remain
            exact = self._exact if len(parts) == 1 else self._extra_exact
            for part in parts:
                message = part.select(vector.view(chunks, n))
                result = message.new_empty(message.numel() // chunks) if scatter else message
                if part.excluded:
                    _reduce_by(exact, result, message, scale, part.unit, scatter)
                else:
                    self._reduce_compressed(result, message, scale, part.unit, scatter)
                part.insert(result, output.view(1, n))
        else:
            self._reduce_compressed(output, vector, scale, unit, scatter)

    def _reduce_compressed(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit, scatter: bool
    ) -> None:
        if self.feedback is not None and (unit.name, vector.numel()) not in self._laid_out:
            self._lay_out(unit, vector.numel(), scatter)
        if self._is_wide(vector):
            if scatter:
                self._reduce_scatter(output, vector, scale, unit)
            else:
                self._all_reduce(vector, scale, unit)
            return
        wide = vector.float()
        result = torch.empty_like(output, dtype=torch.float32) if scatter else wide
        with self._raw_bytes_of(vector):
            self._reduce_compressed(result, wide, scale, unit, scatter)
        output.copy_(result)

    def _bypasses(self, unit: Unit, chunk: int, chunks: int, dtype: torch.dtype) -> bool:
        """Return whether a whole message is sent uncompressed; count the reason.

        Args:
            chunk: elements of a chunk.
            chunks: number of chunks into which the rows of each block are cut.
        """
        if dtype not in _TYPES:
            reason = str(dtype)
        elif unit.blocks and sum(unit.chunk_sizes(chunks)) != chunk:
            reason = NO_GRADIENT
        elif self._warmup and self._messages[unit.name] < self._warmup:
            self._messages[unit.name] += 1
            reason = WARM_UP
        else:
            return False
        self.account.uncompressed[reason] += 1
        return True

    def _is_short(self, n: int) -> bool:
        """Return whether a message of n elements is too short for the codec; count that."""
        if n >= self.minimum_size:
            return False
        self.account.uncompressed[f"fewer than {self.minimum_size} elements"] += 1
        return True

    def _parts(self, unit: Unit, chunks: int) -> list["_Part"]:
        """Return the excluded blocks and the others as separate messages; none without excluded."""
        if not any(block.name in self._excluded for block in unit.blocks):
            return []
        self.account.uncompressed[BY_NAME] += 1
        parts = [_Part(True, unit.name), _Part(False, unit.name)]
        start = 0
        for block, width in zip(unit.blocks, unit.chunk_sizes(chunks), strict=True):
            part = parts[0] if block.name in self._excluded else parts[1]
            part.blocks.append(block)
            part.columns.append(slice(start, start + width))
            start += width
        return [part for part in parts if part.blocks]

    def _lay_out(self, unit: Unit, n: int, scatter: bool) -> None:
        """Record the order of a unit's elements before its first message of n elements."""
        assert self.feedback is not None, "there are residuals"
        self._laid_out.add((unit.name, n))
        # shorter ones have no residual, also when they are padded
        if n > self.minimum_size - self.world_size:
            size = self.world_size
            layout = Layout.scattering(unit, size, n // size) if scatter else Layout.whole(size, n)
            self.feedback.lay_out(unit.name, layout._replace(ranks_per_node=self.ranks_per_node))

    def _is_wide(self, vector: Tensor) -> bool:
        """Return whether a message needs no conversion: short ones have no codec."""
        return vector.dtype == torch.float32 or vector.numel() < self.minimum_size

    @contextmanager
    def _raw_bytes_of(self, narrow: Tensor) -> Iterator[None]:
        """Count `bytes_raw` of float32 in the block as those of a narrower type."""
        account, raw = self.account, self.account.bytes_raw
        yield
        account.bytes_raw = raw + (account.bytes_raw - raw) * narrow.element_size() / 4


def _reduce_by(
    collective: Collective,
    output: Tensor,
    vector: Tensor,
    scale: float,
    unit: Unit,
    scatter: bool,
) -> None:
    if scatter:
        collective.reduce_scatter(output, vector, scale, unit)
    else:
        collective.all_reduce(vector, scale, unit)


class _Part:
    """Blocks of a unit that are sent as one message.

    Args:
        excluded: from compression.
    """

    def __init__(self, excluded: bool, name: str) -> None:
        self.excluded, self._name = excluded, name
        self.blocks: list[Block] = []
        self.columns: list[slice] = []
        """of the blocks, in the chunks of the whole unit"""

    @property
    def unit(self) -> Unit:
        return Unit(self._name, tuple(self.blocks))

    def select(self, chunks: Tensor) -> Tensor:
        """Return the elements of these blocks, from vectors [chunks, n], as one flat vector."""
        return torch.cat([chunks[:, columns] for columns in self.columns], 1).flatten()

    def insert(self, vector: Tensor, chunk: Tensor) -> None:
        """Write the elements of these blocks to a chunk [1, n] of the whole unit."""
        start = 0
        for columns in self.columns:
            width = columns.stop - columns.start
            chunk[0, columns] = vector[start : start + width]
            start += width
