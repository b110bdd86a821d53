"""State that follows the steps of training: error feedback, and numbers of random weights.

Error feedback must be able to roll back a whole step, however many messages the step took, so it is
notified when an optimizer has updated the parameters. Random codecs of weights must draw the same
numbers in the forward and the backward pass of a unit, whatever is updated in between.

Residuals are stored as

    fp32    4 bytes per element, exact
    bf16    2 bytes, rounded to nearest even
    int8    1 byte and 1/64 for the scales: `shardlab.codecs.integers.Int8` in groups of 128

Error feedback loses what this rounding drops, as in LoCo (Xie et al. 2024), which stores residuals
in eight bits. Magnitudes are clamped to 2**126, the largest that both narrow forms hold.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardlab.codecs.base import Block, Codec, MessageKey, Unit
from shardlab.codecs.integers import Int8
from shardlab.codecs.wire import Buffers
from shardlab.core import torch_private
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError

LAYOUT = "layout:"
"""prefix of layouts in the state of error feedback; parts begin with units, which have no colon"""
ACROSS = "@nodes"
"""suffix of units at the second level of `HierarchicalCollective`"""
_DRAW = "weights.draw."

Residual = Literal["fp32", "bf16", "int8"]

_GROUP = 128
_PIECE = 1 << 20
"""elements that are squared at once"""
_INT8 = Int8(_GROUP)
_LARGEST = 2.0**126
_LARGEST_SCALE = torch.tensor(_LARGEST / 127, dtype=torch.bfloat16)
"""of a group that holds `_LARGEST`; larger elements have no smaller one"""
_DTYPES: dict[Residual, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
}


class Draws:
    """Number of the random draw of each unit of gathered parameters.

    A forward pass after a backward pass of the same unit draws anew, so that both passes of a step
    use equal parameters, and other units, models and optimizers change nothing of that. Only
    collectives count, which all ranks call in one order, so the ranks agree.
    """

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._ended: set[str] = set()
        """units that have been used in a backward pass since they were drawn"""

    def number(self, unit: str) -> int:
        """Return the number of the present draw."""
        return self._numbers[unit]

    def note_pass(self, unit: str, is_backward: bool) -> None:
        """Note that a unit is gathered or reduced in a backward pass, or gathered in a forward."""
        if is_backward:
            self._ended.add(unit)
        elif unit in self._ended:
            self._ended.remove(unit)
            self._numbers[unit] += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number that the next forward pass of each unit uses, equal on all ranks."""
        units = self._numbers.keys() | self._ended
        return {_DRAW + u: torch.tensor(self._numbers[u] + (u in self._ended)) for u in units}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from saved numbers; units without one begin at 0."""
        saved = {k.removeprefix(_DRAW): int(v) for k, v in state.items() if k.startswith(_DRAW)}
        self._numbers, self._ended = Counter(saved), set()


class ResidualLayout(NamedTuple):
    """Order of the elements of a unit in a message of a given world size.

    `scattered`: as `Unit` defines it, rows over the ranks, block by block;
    otherwise one vector that is padded at its end to a multiple of the world size.
    """

    world_size: int
    scattered: bool
    shapes: tuple[tuple[int, int], ...]
    """rows and columns of each block"""
    ranks_per_node: int = 0
    """of two levels, whose residuals lie in the order of `HierarchicalCollective`; 0 for one"""

    @classmethod
    def scattering(cls, unit: Unit, world_size: int, n: int) -> "ResidualLayout":
        """Return the layout of vector[world_size * n], scattered; without blocks one of n rows."""
        blocks = unit.blocks or (Block(unit.name, world_size * n, 1),)
        return cls(world_size, True, tuple((b.rows, b.columns) for b in blocks))

    @classmethod
    def whole(cls, world_size: int, n: int) -> "ResidualLayout":
        """Return the layout of vector[n] that is summed whole."""
        return cls(world_size, False, ((n, 1),))

    def tensor(self) -> Tensor:
        """Return int64 [3 + 2 * blocks], for a state."""
        numbers = [self.world_size, int(self.scattered), self.ranks_per_node]
        return torch.tensor([*numbers, *(x for shape in self.shapes for x in shape)])

    @classmethod
    def of(cls, tensor: Tensor) -> "ResidualLayout":
        """Return the layout from its `tensor()`."""
        world_size, scattered, ranks_per_node, *rest = tensor.tolist()
        shapes = tuple(zip(rest[::2], rest[1::2], strict=True))
        return cls(world_size, bool(scattered), shapes, ranks_per_node)

    def describe(self) -> str:
        """Return a phrase for messages."""
        elements = sum(rows * columns for rows, columns in self.shapes)
        nodes = f" in nodes of {self.ranks_per_node}" if self.ranks_per_node else ""
        return f"{elements} elements in {len(self.shapes)} blocks on {self.world_size} ranks{nodes}"

    def blocks_of(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Return the blocks [rows, columns] without padding, from the chunks of all ranks."""
        widths = [-(-rows // self.world_size) * columns for rows, columns in self.shapes]
        pieces = torch.stack(list(chunks)).split(widths, 1)
        return [
            piece.reshape(-1, columns)[:rows]
            for piece, (rows, columns) in zip(pieces, self.shapes, strict=True)
        ]

    def chunks_of(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Return the chunk of each rank, padded with zeros, from the blocks [rows, columns]."""
        size = self.world_size
        pieces = [
            torch.nn.functional.pad(block, (0, 0, 0, -len(block) % size)).reshape(size, -1)
            for block in blocks
        ]
        return list(torch.cat(pieces, 1))


class ErrorFeedback:
    """Residuals of one sender, one per part of a message (Karimireddy et al. 2019, algorithm 2).

    A part is named after its unit: `unit>to` is the chunk for rank `to` of a reduce-scatter,
    `unit<` the shard that its owner sends to an all-gather, `unit*` a vector that is sent whole.

    Laws:
    - over any number of messages, sum(sent) + residual = sum(vectors), up to the rounding of the
      storage (none for `fp32`);
    - a residual is always finite;
    - `rollback` restores, bit for bit, the residuals before the first message of the last step.

    `end_step` ends a step; `attach` calls `updated` after each update by an optimizer. All
    vectors of one step read and write the same generation of a residual. The generation before it
    is kept for `rollback` until the first message of the next step: an optimizer may have left out
    its update without a word, as fused ones do for a loss scaler.

    Args:
        residual: storage of residuals: fp32, bf16 or int8.
        decay: factor of what was not sent before it is stored; below 1, the sum of what was sent
            and the residual lacks the rest.
    """

    def __init__(self, residual: Residual = "fp32", decay: float = 1.0) -> None:
        self._kind: Residual = residual
        self._decay = decay
        self._current: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._changed: set[str] = set()
        """parts whose current residual is of the last step, and the one before is valid"""
        self._has_ended = False
        """whether the next message begins a step"""
        self._layouts: dict[str, ResidualLayout] = {}
        self._buffers = Buffers()

    def encode(
        self, codec: Codec, vector: Tensor, part: str, key: MessageKey, out: Tensor | None = None
    ) -> Tensor:
        """Return the payload of `vector` + residual; store what the payload lacks as the residual.

        Args:
            out: buffer for the payload, see `Codec.encode`.

        Raises:
            ValueError: the part had another length before.
        """
        current, target = self._open(vector, part)
        if self._kind == "fp32":
            payload = codec.encode_residual(vector, current, target, key, out)
            if self._decay != 1:
                target.mul_(self._decay)
            return payload
        buffer = self._buffers.floats("residual", vector.numel(), vector.device)
        residual = widen(current, buffer)
        payload = codec.encode_residual(vector, residual, residual, key, out)
        if self._decay != 1:
            residual.mul_(self._decay)
        narrow(residual, target)
        return payload

    def corrected(self, vector: Tensor, part: str) -> Tensor:
        """Return `vector` + residual: a new float32 vector."""
        return vector + widen(self._residual(vector, part))

    def store_residual(self, part: str, error: Tensor, mask: Tensor) -> None:
        """Store `error`, the part of `corrected(vector, part)` that was not sent, as the residual.

        Args:
            mask: bool [], on the device; where it is false, the residual does not change.
        """
        current, target = self._open(error, part)
        before = current.clone() if target is current else current
        kept = torch.where(error.isfinite(), error, widen(current))
        narrow(kept if self._decay == 1 else kept.mul_(self._decay), target)
        torch.where(mask, target, before, out=target)

    def return_unapplied(self, part: str, values: Tensor) -> None:
        """Add to the residual of a part, if it has one, what was sent but is not applied.

        Args:
            values: float32, as many as the part has; those that are not finite are left out.
        """
        if part not in self._current:
            return
        stored = self._current[part]
        residual = widen(stored)
        total = residual + values
        narrow(torch.where(total.isfinite(), total, residual), stored)

    def end_step(self) -> None:
        """End the step: the next message is the first of another one."""
        self._has_ended = True

    def updated(self, _: object) -> None:
        """End the step after an update of parameters by an optimizer of torch."""
        if torch_private.in_backward():
            # other units of this step are still to be sent
            torch_private.call_after_backward(self.end_step)
        else:
            self.end_step()

    def rollback(self) -> None:
        """Restore the residuals before the last step, whose update is skipped."""
        for part in self._changed:
            self._current[part], self._before[part] = self._before[part], self._current[part]
        self._changed.clear()

    def lay_out(self, unit: str, layout: ResidualLayout, unsent_part: str = "*") -> None:
        """Record the layout of the residuals of `unit`, for other world sizes.

        Args:
            unsent_part: ends the name of a part that messages of the unit do not have.

        Raises:
            UserError: loaded residuals have another layout, or are of such a part.
        """
        if unit + unsent_part in self._current:
            phases = "several phases" if unsent_part == "*" else "one phase"
            raise UserError(
                f"error feedback: the residual of {unit!r} is of a codec of {phases}, and would "
                "never be sent: attach with the codec that the state was saved with"
            )
        known = self._layouts.setdefault(unit, layout)
        if known != layout:
            raise UserError(
                f"error feedback: the residual of {unit!r} is of {known.describe()}, the model of "
                f"{layout.describe()}: merge the states with shardlab.merge_states first"
            )

    def norm(self) -> float:
        """Return the Euclidean norm over all residuals of this rank."""
        return math.sqrt(self.sum_of_squares())

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares of all residuals of this rank: float64 [], on their device."""
        total = torch.zeros((), dtype=torch.float64)
        for stored in self._current.values():
            if self._kind == "fp32":
                residual = stored
            else:
                buffer = self._buffers.floats("residual", elements(stored), stored.device)
                residual = widen(stored, buffer)
            # in pieces: in float64 a whole residual takes twice its memory
            for piece in residual.split(_PIECE):
                total = total + piece.double().square().sum()
        return total

    def state_dict(self) -> dict[str, Tensor]:
        """Return the residuals by part, as they are stored, and the layouts by unit."""
        layouts = {LAYOUT + unit: layout.tensor() for unit, layout in self._layouts.items()}
        return {**self._current, **layouts}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from saved residuals of any storage."""
        self._current, self._before, self._layouts = {}, {}, {}
        self._changed.clear()
        for name, tensor in state.items():
            if name.startswith(LAYOUT):
                self._layouts[name.removeprefix(LAYOUT)] = ResidualLayout.of(tensor)
                continue
            self._new(name, elements(tensor), tensor.device)
            if tensor.dtype == self._current[name].dtype:
                self._current[name].copy_(tensor)  # bit for bit, without rounding again
            else:
                narrow(widen(tensor), self._current[name])

    def _open(self, vector: Tensor, part: str) -> tuple[Tensor, Tensor]:
        """Return the residual to add and the storage of the next one; they may be the same."""
        if self._has_ended:
            self._changed.clear()
            self._has_ended = False
        current = self._residual(vector, part)
        if part in self._changed:
            return current, current
        self._changed.add(part)
        self._current[part], self._before[part] = self._before[part], current
        return current, self._current[part]

    def _residual(self, vector: Tensor, part: str) -> Tensor:
        """Return the stored residual of a part, zeros at first."""
        if part not in self._current:
            self._new(part, vector.numel(), vector.device)
        if self._current[part].device != vector.device:  # loaded, as checkpoints are, on the host
            for residuals in (self._current, self._before):
                residuals[part] = residuals[part].to(vector.device)
        current = self._current[part]
        if current.numel() != vector.numel() and elements(current) != vector.numel():
            raise ValueError(
                f"error feedback: message {part!r} has {vector.numel()} elements, its residual "
                f"{elements(current)}: the layout of the model changed"
            )
        return current

    def _new(self, part: str, n: int, device: torch.device) -> None:
        self._current[part] = zeros(self._kind, n, device)
        self._before[part] = zeros(self._kind, n, device)


def zeros(kind: Residual, n: int, device: torch.device) -> Tensor:
    """Return n stored zeros."""
    size = _INT8.payload_bytes(n) if kind == "int8" else n
    return torch.zeros(size, dtype=_DTYPES[kind], device=device)


def elements(stored: Tensor) -> int:
    """Return the number of elements that `stored` holds."""
    if stored.dtype != torch.uint8:
        return stored.numel()
    groups = -(-stored.numel() // (_GROUP + 2))
    return stored.numel() - 2 * groups


def widen(stored: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the elements in float32: `stored` itself if that is its dtype.

    Args:
        out: float32 [elements], written otherwise; by default a new vector.
    """
    if stored.dtype == torch.float32:
        return stored
    if out is None:
        out = torch.empty(elements(stored), dtype=torch.float32, device=stored.device)
    if stored.dtype == torch.uint8:
        _INT8.decode_sum([stored], out)
    else:
        out.copy_(stored)
    return out


def narrow(vector: Tensor, stored: Tensor) -> None:
    """Write a finite float32 vector to `stored`; clamp in `vector` what its form cannot hold."""
    if stored.dtype == torch.float32:
        stored.copy_(vector)
    elif stored.dtype == torch.uint8:
        if on_device := accelerator_of(vector.device) is not None:
            vector.clamp_(-_LARGEST, _LARGEST)  # the host would wait for a look at the scales
        _INT8.encode(vector, out=stored)
        if on_device:
            return
        # checking the scales is cheaper than a pass over all elements; NaN means too large
        scales = stored[: 2 * -(-vector.numel() // _GROUP)].view(torch.bfloat16)
        if scales.numel() and not scales.amax() < _LARGEST_SCALE:
            _INT8.encode(vector.clamp_(-_LARGEST, _LARGEST), out=stored)
    else:
        stored.copy_(vector.clamp_(-_LARGEST, _LARGEST))
