"""Error feedback: what was not sent is added to the next vector of the same unit."""

import math

import torch
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey
from shardlab.codecs.wire import Buffers
from shardlab.comm.layout import PREFIX, Layout
from shardlab.comm.residuals import Residual, blank, elements, narrow, widen
from shardlab.core.errors import UserError


class ErrorFeedback:
    """Residuals of one sender, one per part of a message (Karimireddy et al. 2019, algorithm 2).

    A part is named by its unit: `unit>to` is what goes to rank `to` of a reduce-scatter, `unit<`
    what an owner gives to an all-gather, `unit*` a vector that is sent as a whole.

    Laws:
    - over any number of messages, sum(sent) + residual = sum(given), up to the rounding of the
      storage (none for `fp32`);
    - a residual never takes a value that is not finite;
    - `rollback` restores, bit for bit, what there was before the step.

    A step ends when the parameters are updated: then somebody calls `step_ended`
    (`shardlab.comm.steps` does, for every optimizer of torch). Until the first such call a part
    that is encoded again starts a new step. All vectors of one step read and write the same
    generation of a residual, the generation before it is kept beside it.

    Args:
        residual: how residuals are stored, see `shardlab.comm.residuals`.
    """

    def __init__(self, residual: Residual = "fp32") -> None:
        self._kind: Residual = residual
        self._current: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._changed: set[str] = set()
        """parts whose current residual comes from the running step, and the one before is valid"""
        self._told = False
        self._layouts: dict[str, Layout] = {}
        self._buffers = Buffers()

    def encode(
        self, codec: Codec, vector: Tensor, part: str, key: MessageKey, out: Tensor | None = None
    ) -> Tensor:
        """The payload of `vector` and what is left over from the message before.

        Args:
            out: buffer for the payload, see `Codec.encode`.

        Raises:
            ValueError: the part had another length before.
        """
        current, target = self._open(vector, part)
        if self._kind == "fp32":
            payload = codec.encode_residual(vector, current, target, key, out)
        else:
            room = self._buffers.floats("residual", vector.numel(), vector.device)
            residual = widen(current, room)
            payload = codec.encode_residual(vector, residual, residual, key, out)
            narrow(residual, target)
        self._close(part, target)
        return payload

    def given(self, vector: Tensor, part: str) -> Tensor:
        """`vector` and what is left over from the message before: a new float32 vector."""
        current, _ = self._open(vector, part)
        return vector + widen(current)

    def keep(self, part: str, rest: Tensor) -> None:
        """`rest`, what was not sent of `given(vector, part)`, goes with the next message."""
        current, target = self._open(rest, part)
        narrow(torch.where(rest.isfinite(), rest, widen(current)), target)
        self._close(part, target)

    def step_ended(self) -> None:
        """The parameters are updated: what was sent for it is no longer rolled back."""
        self._told = True
        self._changed.clear()

    def rollback(self) -> None:
        """Takes back the running step, whose update is left out."""
        for part in self._changed:
            self._current[part], self._before[part] = self._before[part], self._current[part]
        self._changed.clear()

    def lay_out(self, unit: str, layout: Layout) -> None:
        """Notes how the residuals of `unit` are laid out, so that other world sizes can use them.

        Raises:
            UserError: the residuals that were loaded are laid out otherwise.
        """
        known = self._layouts.setdefault(unit, layout)
        if known != layout:
            raise UserError(
                f"error feedback: the residual of {unit!r} is of {known.describe()}, the model of "
                f"{layout.describe()}: merge the states with shardlab.merge_states first"
            )

    def norm(self) -> float:
        """Euclidean norm over all residuals of this rank."""
        squares = [widen(stored).double().square().sum() for stored in self._current.values()]
        return math.sqrt(sum(squares))

    def nbytes(self) -> int:
        """Memory that both generations take, in bytes."""
        return sum(s.nbytes for side in (self._current, self._before) for s in side.values())

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals by part, as they are stored, and the layouts by unit."""
        layouts = {PREFIX + unit: layout.tensor() for unit, layout in self._layouts.items()}
        return {**self._current, **layouts}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from saved residuals, however they were stored."""
        self._current, self._before, self._layouts = {}, {}, {}
        self._changed.clear()
        for name, tensor in state.items():
            if name.startswith(PREFIX):
                self._layouts[name.removeprefix(PREFIX)] = Layout.of(tensor)
                continue
            self._new(name, elements(tensor), tensor.device)
            if tensor.dtype == self._current[name].dtype:
                self._current[name].copy_(tensor)
            else:
                narrow(widen(tensor), self._current[name])

    def _open(self, vector: Tensor, part: str) -> tuple[Tensor, Tensor]:
        """The residual to add, and where the next one goes; they may be one."""
        if part not in self._current:
            self._new(part, vector.numel(), vector.device)
        current = self._current[part]
        if elements(current) != vector.numel():
            raise ValueError(
                f"error feedback: message {part!r} has {vector.numel()} elements, its residual "
                f"{elements(current)}: the layout of the model changed"
            )
        if part in self._changed and not self._told:
            self._changed.clear()
        return current, current if part in self._changed else self._before[part]

    def _close(self, part: str, target: Tensor) -> None:
        if part not in self._changed:
            self._current[part], self._before[part] = target, self._current[part]
            self._changed.add(part)

    def _new(self, part: str, n: int, device: torch.device) -> None:
        self._current[part] = blank(self._kind, n, device)
        self._before[part] = blank(self._kind, n, device)
