"""Collective that sends excluded messages uncompressed, with the reason in the ledger."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from shardlab.codecs.unit import Unit
from shardlab.comm.collective import Collective
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.layout import Layout
from shardlab.comm.native import Native

BY_NAME = "excluded by name"
WARM_UP = "warm-up"
NO_GRADIENT = "a parameter without gradient"
_MESSAGES = "messages:"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class BypassCollective(Collective):
    """Collective that sends messages through `inner`, except those that bypass it uncompressed.

    Uncompressed are, in this order: messages of other types than float32, bf16 and fp16; messages
    without the gradients of some parameters of the unit; the first `warmup` messages of a unit;
    excluded blocks, which are taken out of the message and sent as a separate one. Codecs take
    float32: narrower messages are widened for them, and have residuals in float32.

    Args:
        exact: sends messages of any type uncompressed.
        excluded: names of blocks.
        warmup: number of messages of each unit.
        feedback: records the layouts of its residuals.
        minimum_size: of messages that `inner` compresses; infinite where it compresses none.
    """

    def __init__(
        self,
        inner: Collective,
        exact: Collective,
        excluded: frozenset[str] = frozenset(),
        warmup: int = 0,
        feedback: ErrorFeedback | None = None,
        minimum_size: float = 0,
    ) -> None:
        super().__init__(inner.group, inner.ledger, inner.kind)
        self.inner = inner
        self._exact = exact
        self._native = Native(inner.group, inner.ledger, inner.kind)
        self._excluded = excluded
        self._warmup = warmup
        self._feedback = feedback
        self._minimum_size = minimum_size
        self._messages: dict[str, int] = {}

    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        def send(collective: Collective, part: Unit, given: Tensor, taken: Tensor) -> None:
            if collective is self.inner:
                self._lay_out(part, Layout.scattering(part, self.world_size, taken.numel()))
            with self._widened(collective, given, taken) as (wide, result):
                collective.reduce_scatter(result, wide, scale, part)

        n = output.numel()
        self._send(unit, vector.view(self.world_size, n), output.view(1, n), send)

    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        def send(collective: Collective, part: Unit, given: Tensor, taken: Tensor) -> None:
            if collective is self.inner:
                self._lay_out(part, Layout.whole(self.world_size, given.numel()))
            with self._widened(collective, given, given) as (wide, _):
                collective.all_reduce(wide, scale, part)
            if given.data_ptr() != taken.data_ptr():
                taken.copy_(given)

        rows = vector.view(1, vector.numel())
        self._send(unit, rows, rows, send)

    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        uncompressed = self._uncompressed(shard, unit.chunk_sizes(self.world_size), unit)
        collective = uncompressed or self.inner
        with self._widened(collective, shard, output) as (wide, result):
            collective.all_gather(result, wide, unit)

    def state_dict(self) -> dict[str, Tensor]:  # noqa: D102
        counts = {_MESSAGES + unit: torch.tensor(n) for unit, n in self._messages.items()}
        return {**self.inner.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: D102
        counts = {name: n for name, n in state.items() if name.startswith(_MESSAGES)}
        self._messages = {name.removeprefix(_MESSAGES): int(n) for name, n in counts.items()}
        self.inner.load_state_dict({k: v for k, v in state.items() if k not in counts})

    def _uncompressed(self, chunk: Tensor, widths: list[int], unit: Unit) -> Collective | None:
        """Return the collective of a message that bypasses the codec, else None."""
        if chunk.dtype not in _TYPES:
            self._report(str(chunk.dtype))
            return self._native
        if widths and sum(widths) != chunk.numel():
            self._report(NO_GRADIENT)
            return self._exact
        sent = self._messages.get(unit.name, 0)
        if sent < self._warmup:
            self._messages[unit.name] = sent + 1
            self._report(WARM_UP)
            return self._exact
        return None

    @contextmanager
    def _widened(
        self, collective: Collective, given: Tensor, taken: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Give a codec float32 in place of a narrower type; bytes_raw are those of the given type.

        Args:
            given, taken: that the collective reads and writes; the same, or apart.
        """
        is_short = max(given.numel(), taken.numel()) < self._minimum_size
        if collective is not self.inner or given.dtype == torch.float32 or is_short:
            yield given, taken
            return
        account, raw = self.account, self.account.bytes_raw
        wide = given.float()
        result = wide if taken is given else torch.empty_like(taken, dtype=torch.float32)
        yield wide, result
        taken.copy_(result)
        account.bytes_raw = raw + (account.bytes_raw - raw) * given.element_size() / 4

    def _lay_out(self, unit: Unit, layout: Layout) -> None:
        if self._feedback is not None:
            layout = layout._replace(ranks_per_node=self.inner.ranks_per_node)
            self._feedback.lay_out(unit.name, layout)

    def _send(
        self,
        unit: Unit,
        given: Tensor,
        taken: Tensor,
        send: Callable[[Collective, Unit, Tensor, Tensor], None],
    ) -> None:
        """Send `given`, whose rows are chunks, and write the result to the row `taken`.

        Excluded blocks are columns, which are sent as a separate message.
        """
        widths = unit.chunk_sizes(len(given))
        uncompressed = self._uncompressed(given[0], widths, unit)
        if uncompressed or not any(block.name in self._excluded for block in unit.blocks):
            send(uncompressed or self.inner, unit, given.view(-1), taken.view(-1))
            return
        self._report(BY_NAME)
        first = True
        for collective, wanted in ((self._exact, True), (self.inner, False)):
            picks = [(block.name in self._excluded) == wanted for block in unit.blocks]
            blocks = tuple(b for b, pick in zip(unit.blocks, picks, strict=True) if pick)
            if not blocks:
                continue
            columns = [
                piece for piece, pick in zip(given.split(widths, 1), picks, strict=True) if pick
            ]
            vector = torch.cat(columns, 1).flatten()
            result = vector.new_empty(vector.numel() // len(given))
            extra = self.ledger.extra_collective(self.account, vector.device)
            with nullcontext() if first else extra:
                send(collective, Unit(unit.name, blocks), vector, result)
            sizes = [piece.shape[1] for piece in columns]
            targets = [t for t, pick in zip(taken.split(widths, 1), picks, strict=True) if pick]
            for target, piece in zip(targets, result.split(sizes), strict=True):
                target.copy_(piece)
            first = False

    def _report(self, reason: str) -> None:
        self.account.uncompressed[reason] += 1
