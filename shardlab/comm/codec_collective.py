"""Base of collectives that compress: what is compressed, what is sent uncompressed, and why."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Block, Codec, Unit
from shardlab.codecs.multi_phase import Method
from shardlab.codecs.wire import describe
from shardlab.comm.collective import Collective, labelled
from shardlab.comm.feedback import Draws, ErrorFeedback, ResidualLayout
from shardlab.comm.ledger import Ledger, MessageKind
from shardlab.comm.uncompressed import uncompressed
from shardlab.core.errors import UserError

METHOD = "method/"
"""beginning of the names of a multi-phase method's state, before its name and options"""
BY_NAME = "excluded by name"
WARM_UP = "warm-up"
NO_GRADIENT = "a parameter without gradient"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Route:
    """Validated options of `attach` for the messages of one kind."""

    method: Method
    native: bool = False
    """use the process group's own collectives: nothing is compressed"""
    minimum_size: int = 0
    """messages of fewer elements are sent uncompressed"""
    excluded: frozenset[str] = frozenset()
    """names of blocks that are sent uncompressed"""
    warmup: int = 0
    """messages of each unit, from the start, that are sent uncompressed"""
    between_nodes: Codec | None = None
    seed: int = 0
    """of random codecs; the same on all ranks"""
    feedback: ErrorFeedback | None = None
    """residuals of this rank"""
    draws: Draws | None = None
    """of the parameters that are gathered, which forward and backward share; without it every
    message has new random numbers"""

    @property
    def is_plain(self) -> bool:
        """Return whether nothing is compressed."""
        return self.method.name == "none" and self.between_nodes is None

    def settings(self) -> str:
        """Return what must be equal on all ranks beside the codec, each after a comma.

        With other seeds the owners of chunks would decode other random numbers than were sent, and
        after other warm-ups one rank would compress what another expects whole.
        """
        named = [f"minimum_size {self.minimum_size}, warmup_steps {self.warmup}, seed {self.seed}"]
        if self.excluded:
            named.append(f"exclude {' '.join(sorted(self.excluded))}")
        if self.feedback is not None:
            named.append("error feedback")
        return "".join(f", {text}" for text in named)


class CodecCollective(Collective):
    """Collective that compresses messages, except those that are sent uncompressed.

    Uncompressed are, in this order, each counted in the ledger with its reason: messages of other
    types than float32, bf16 and fp16; messages without the gradients of some parameters of the
    unit; the first `warmup` messages of a unit; excluded blocks, which are taken out of the message
    and sent as a separate one; messages of fewer than `minimum_size` elements. Codecs take float32:
    narrower messages are widened for them, and have residuals in float32.

    Subclasses compress float32 vectors in `_reduce_scatter`, `_all_reduce` and `_all_gather`, which
    get only what is compressed, and the step of the message.
    """

    ranks_per_node = 0
    """of a two-level collective; 0 for one level"""
    unsent_part = "*"
    """ends the name of a part of residuals that these messages would never send"""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: MessageKind,
        route: Route,
        extra: bool = False,
        audited: bool = True,
    ) -> None:
        super().__init__(group, ledger, kind, extra, audited)
        self.route = route
        self.steps: Counter[str] = Counter()
        """messages of each unit so far, those of the warm-up among them"""
        self._name = describe(route.method)
        self._exact = uncompressed(group, ledger, kind, extra, audited)
        self._extra_exact = uncompressed(group, ledger, kind, True, audited)
        # of the uncompressed messages too: the first of a unit may be one of the warm-up
        self.settings = self._exact.settings = self._extra_exact.settings = route.settings()
        self._laid_out: set[tuple[str, int]] = set()

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        self._reduce(output, vector, scale, unit, True)

    @labelled
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        self._reduce(vector, vector, scale, unit, False)

    @labelled
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        # the group of a backward pass may be a part of the one that padded the shards
        if self._bypasses(unit, shard.dtype):
            self._exact.all_gather(output, shard, unit)
        else:
            self.gather_compressed(output, shard, unit)

    def note_pass(self, unit: Unit, is_backward: bool) -> None:  # noqa: D102
        if self.route.draws is not None:
            self.route.draws.note_pass(unit.name, is_backward)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of messages of each unit, from which random codecs continue."""
        return {unit: torch.tensor(step) for unit, step in self.steps.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: D102
        for name in state:
            if name.startswith(METHOD):
                other = name.removeprefix(METHOD).partition("/")[0]
                raise UserError(
                    f"the state is of codec {other}, the model has {self._name}: attach with that "
                    f"codec, or remove the keys with {METHOD!r} from the state"
                )
        self.steps.clear()
        self.steps.update({unit: int(step) for unit, step in state.items()})

    @property
    def keeps_residuals(self) -> bool:  # noqa: D102
        return self.route.feedback is not None

    def return_to_residuals(self, vector: Tensor, unit: Unit) -> None:  # noqa: D102
        wide = vector.float()
        if not self._has_excluded(unit):
            self.return_compressed(wide, unit)
            return
        for part in self._parts(unit, 1):
            if not part.excluded:
                self.return_compressed(part.select(wide.view(1, -1)), part.unit)

    def reduce_compressed(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit, scatter: bool
    ) -> None:
        """Reduce a message by the codec, unless it is short; what it lost is audited."""
        if self._is_exact(vector.numel()):
            _reduce_by(self._exact, output, vector, scale, unit, scatter)
            return
        if vector.dtype != torch.float32:
            wide = vector.float()
            result = torch.empty_like(output, dtype=torch.float32) if scatter else wide
            with self._raw_bytes_of(vector):
                self.reduce_compressed(result, wide, scale, unit, scatter)
            output.copy_(result)
        elif scatter:
            self._reduce_scatter(output, vector, scale, unit, self._begin(unit, vector))
            self._compare_exactly(output, vector, scale)
        else:
            exact = None if self._audit is None else vector.clone()
            self._all_reduce(vector, scale, unit)
            if exact is not None:
                # what ranks receive: the gather has an error of its own
                reduced = self._chunks(self._padded(vector))[self.rank]
                self._compare_exactly(reduced, self._padded(exact), scale)

    def gather_compressed(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """Gather shards by the codec, unless their message is short."""
        if self._is_exact(output.numel()):
            self._exact.all_gather(output, shard, unit)
        elif output.dtype == torch.float32:
            self._all_gather(output, shard, unit, self._begin(unit, output))
        else:
            result = torch.empty_like(output, dtype=torch.float32)
            with self._raw_bytes_of(shard):
                self._all_gather(result, shard.float(), unit, self._begin(unit, result))
            output.copy_(result)

    @abstractmethod
    def return_compressed(self, vector: Tensor, unit: Unit) -> None:
        """Add a float32 vector[n] to the residuals of an all-reduce."""

    @abstractmethod
    def _reduce_scatter(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit, step: int
    ) -> None:
        """Write this rank's shard of the sum, times `scale`, to `output`."""

    def _all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """Reduce-scatter, then all-gather the sums, by default: two messages."""
        padded = self._padded(vector)
        shard = padded.new_empty(padded.numel() // self.world_size)
        self._reduce_scatter(shard, padded, scale, unit, self._begin(unit, padded))
        self._all_gather(padded, shard, unit, self._begin(unit, padded))
        if padded is not vector:
            vector.copy_(padded[: vector.numel()])

    def _all_gather(self, output: Tensor, shard: Tensor, unit: Unit, step: int) -> None:
        """Write the shards of all ranks to `output`, uncompressed by default."""
        self._exact.all_gather(output, shard, unit)

    def _reduce(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit, scatter: bool
    ) -> None:
        """Reduce-scatter, or all-reduce with `vector` as the output, what is compressed or not."""
        n, chunks = output.numel(), self.world_size if scatter else 1
        complete = not unit.blocks or sum(unit.chunk_sizes(chunks)) == n
        if self._bypasses(unit, vector.dtype, complete):
            _reduce_by(self._exact, output, vector, scale, unit, scatter)
        elif self._has_excluded(unit):
            self.account.uncompressed[BY_NAME] += 1
            # excluded blocks are an extra message where others remain
            parts = self._parts(unit, chunks)
            exact = self._exact if len(parts) == 1 else self._extra_exact
            for part in parts:
                message = part.select(vector.view(chunks, n))
                result = message.new_empty(message.numel() // chunks) if scatter else message
                if part.excluded:
                    _reduce_by(exact, result, message, scale, part.unit, scatter)
                else:
                    self._lay_out(part.unit, message.numel(), scatter)
                    self.reduce_compressed(result, message, scale, part.unit, scatter)
                part.insert(result, output.view(1, n))
        else:
            self._lay_out(unit, vector.numel(), scatter)
            self.reduce_compressed(output, vector, scale, unit, scatter)

    def _bypasses(self, unit: Unit, dtype: torch.dtype, complete: bool = True) -> bool:
        """Return whether a whole message is sent uncompressed; count the reason.

        Args:
            complete: whether it has the gradients of all parameters of the unit.
        """
        if dtype not in _TYPES:
            reason = str(dtype)
        elif not complete:
            reason = NO_GRADIENT
        elif self.steps[unit.name] < self.route.warmup:
            self.steps[unit.name] += 1
            reason = WARM_UP
        else:
            return False
        self.account.uncompressed[reason] += 1
        return True

    def _is_exact(self, n: int) -> bool:
        """Return whether a vector of n elements is sent uncompressed; count one that is short."""
        if self.route.is_plain:
            return True
        if n >= self.route.minimum_size:
            return False
        self.account.uncompressed[f"fewer than {self.route.minimum_size} elements"] += 1
        return True

    def _begin(self, unit: Unit, vector: Tensor) -> int:
        """Return the step of this message of the unit, on which all ranks agree at first."""
        if self.route.draws is None:
            step = self.steps[unit.name] - self.route.warmup
            self.steps[unit.name] += 1
        else:
            step = self.route.draws.number(unit.name)
        self._agree(unit, vector, self._name, step)
        return step

    def _has_excluded(self, unit: Unit) -> bool:
        return any(block.name in self.route.excluded for block in unit.blocks)

    def _parts(self, unit: Unit, chunks: int) -> list["_MessageBlocks"]:
        """Return the excluded blocks and the others as separate messages."""
        parts = [_MessageBlocks(True, unit.name), _MessageBlocks(False, unit.name)]
        start = 0
        for block, width in zip(unit.blocks, unit.chunk_sizes(chunks), strict=True):
            part = parts[0] if block.name in self.route.excluded else parts[1]
            part.blocks.append(block)
            part.columns.append(slice(start, start + width))
            start += width
        return [part for part in parts if part.blocks]

    def _lay_out(self, unit: Unit, n: int, scatter: bool) -> None:
        """Record the order of a unit's elements before its first message of n elements."""
        feedback = self.route.feedback
        if feedback is None or (unit.name, n) in self._laid_out:
            return
        self._laid_out.add((unit.name, n))
        if n >= self.route.minimum_size:  # shorter ones have no residual
            size = self.world_size
            layout = (
                ResidualLayout.scattering(unit, size, n // size)
                if scatter
                else ResidualLayout.whole(size, n)
            )
            layout = layout._replace(ranks_per_node=self.ranks_per_node)
            feedback.lay_out(unit.name, layout, self.unsent_part)

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


class _MessageBlocks:
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
