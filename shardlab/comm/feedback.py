"""State that follows optimizer steps: error feedback and the counter of parameter updates.

Error feedback must be able to roll back a whole step, however many messages the step took. Random
codecs of weights must draw the same numbers in the forward and the backward pass of a step. So both
are notified when an optimizer has updated the parameters.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardlab.codecs.base import Codec, MessageKey
from shardlab.codecs.wire import Buffers
from shardlab.comm.layout import LAYOUT, Layout
from shardlab.comm.residuals import Residual, blank, elements, narrow, widen
from shardlab.core.errors import UserError

_COUNT = "weights.updates"


class Updates:
    """Counter of parameter updates: gathers between two updates send the same parameters."""

    def __init__(self) -> None:
        self.count = 0

    def step_ended(self) -> None:
        """Count an update."""
        self.count += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the count, the same on all ranks."""
        return {_COUNT: torch.tensor(self.count)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved count, or from 0."""
        self.count = int(state.get(_COUNT, 0))


class ErrorFeedback:
    """Residuals of one sender, one per part of a message (Karimireddy et al. 2019, algorithm 2).

    A part is named after its unit: `unit>to` is the chunk for rank `to` of a reduce-scatter,
    `unit<` the shard that its owner sends to an all-gather, `unit*` a vector that is sent whole.

    Laws:
    - over any number of messages, sum(sent) + residual = sum(given), up to the rounding of the
      storage (none for `fp32`);
    - a residual is always finite;
    - `rollback` restores, bit for bit, the residuals before the step.

    `step_ended` ends a step (`register_step_hook` calls it for every optimizer of torch). Until its
    first call, a part that is encoded again starts a new step. All vectors of one step read and
    write the same generation of a residual; the generation before it is kept for `rollback`.

    Args:
        residual: storage of residuals, see `shardlab.comm.residuals`.
    """

    def __init__(self, residual: Residual = "fp32") -> None:
        self._kind: Residual = residual
        self._current: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._changed: set[str] = set()
        """parts whose current residual is of the running step, and the one before is valid"""
        self._has_step_hook = False
        self._layouts: dict[str, Layout] = {}
        self._buffers = Buffers()

    def encode(
        self, codec: Codec, vector: Tensor, part: str, key: MessageKey, out: Tensor | None = None
    ) -> Tensor:
        """Return the payload of `vector` + residual; keep what the payload lacks as the residual.

        Args:
            out: buffer for the payload, see `Codec.encode`.

        Raises:
            ValueError: the part had another length before.
        """
        current, target = self._open(vector, part)
        if self._kind == "fp32":
            payload = codec.encode_residual(vector, current, target, key, out)
        else:
            buffer = self._buffers.floats("residual", vector.numel(), vector.device)
            residual = widen(current, buffer)
            payload = codec.encode_residual(vector, residual, residual, key, out)
            narrow(residual, target)
        self._close(part, target)
        return payload

    def given(self, vector: Tensor, part: str) -> Tensor:
        """Return `vector` + residual: a new float32 vector."""
        current, _ = self._open(vector, part)
        return vector + widen(current)

    def keep(self, part: str, rest: Tensor, sent: Tensor) -> None:
        """Keep `rest`, the part of `given(vector, part)` that was not sent, as the residual.

        Args:
            sent: bool [], on the device; where it is false, the residual does not change.
        """
        current, target = self._open(rest, part)
        before = current.clone() if target is current else current
        narrow(torch.where(rest.isfinite(), rest, widen(current)), target)
        torch.where(sent, target, before, out=target)
        self._close(part, target)

    def step_ended(self) -> None:
        """End the step: the parameters are updated, so `rollback` goes back no further."""
        self._has_step_hook = True
        self._changed.clear()

    def rollback(self) -> None:
        """Restore the residuals before the running step, whose update is skipped."""
        for part in self._changed:
            self._current[part], self._before[part] = self._before[part], self._current[part]
        self._changed.clear()

    def lay_out(self, unit: str, layout: Layout) -> None:
        """Record the layout of the residuals of `unit`, for other world sizes.

        Raises:
            UserError: loaded residuals have another layout.
        """
        known = self._layouts.setdefault(unit, layout)
        if known != layout:
            raise UserError(
                f"error feedback: the residual of {unit!r} is of {known.describe()}, the model of "
                f"{layout.describe()}: merge the states with shardlab.merge_states first"
            )

    def norm(self) -> float:
        """Return the Euclidean norm over all residuals of this rank."""
        squares = [widen(stored).double().square().sum() for stored in self._current.values()]
        return math.sqrt(sum(squares))

    def nbytes(self) -> int:
        """Return the bytes of both generations."""
        return sum(s.nbytes for side in (self._current, self._before) for s in side.values())

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
                self._layouts[name.removeprefix(LAYOUT)] = Layout.of(tensor)
                continue
            self._new(name, elements(tensor), tensor.device)
            if tensor.dtype == self._current[name].dtype:
                self._current[name].copy_(tensor)  # bit for bit, without rounding again
            else:
                narrow(widen(tensor), self._current[name])

    def _open(self, vector: Tensor, part: str) -> tuple[Tensor, Tensor]:
        """Return the residual to add and the storage of the next one; they may be the same."""
        if part not in self._current:
            self._new(part, vector.numel(), vector.device)
        current = self._current[part]
        if elements(current) != vector.numel():
            raise ValueError(
                f"error feedback: message {part!r} has {vector.numel()} elements, its residual "
                f"{elements(current)}: the layout of the model changed"
            )
        if part in self._changed and not self._has_step_hook:
            self._changed.clear()
        return current, current if part in self._changed else self._before[part]

    def _close(self, part: str, target: Tensor) -> None:
        if part not in self._changed:
            self._current[part], self._before[part] = target, self._current[part]
            self._changed.add(part)

    def _new(self, part: str, n: int, device: torch.device) -> None:
        self._current[part] = blank(self._kind, n, device)
        self._before[part] = blank(self._kind, n, device)


def register_step_hook(model: nn.Module, listener: Updates | ErrorFeedback) -> Callable[[], None]:
    """Call `listener.step_ended()` after each update of `model`; return a function that stops that.

    torch calls the hook for every optimizer of the process, so each call is matched with the
    parameters of the model. The hook keeps neither of the two alive.
    """
    model_ref = weakref.ref(model)
    listener_ref = weakref.ref(listener)

    def updated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        module, alive = model_ref(), listener_ref()
        if module is None or alive is None:
            return
        own = {id(parameter) for parameter in module.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            alive.step_ended()

    hook = register_optimizer_step_post_hook(updated)
    # models are dropped without `detach`, and the registry of torch is global
    weakref.finalize(listener, hook.remove)
    return hook.remove
