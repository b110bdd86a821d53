"""Notification of optimizer steps: who has to know that the parameters were updated.

Error feedback listens, so that it can roll back a whole step without an update, however many
messages the step took. Random codecs of weights listen, since forward and backward pass must see
the same decoded weights. torch calls its hook for every optimizer of the process, so each call is
matched with the parameters of the model.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_COUNT = "weights.updates"


class StepListener(Protocol):
    """Object that is notified of optimizer steps."""

    def step_ended(self) -> None:
        """Note that the parameters are updated."""


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


def register_step_hook(model: nn.Module, listener: StepListener) -> Callable[[], None]:
    """Call `listener.step_ended()` after each update of `model`; return a function that stops that.

    The hook keeps neither of the two alive.
    """
    model_ref = weakref.ref(model)
    listener_ref = weakref.ref(listener)

    def updated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        module, alive = model_ref(), listener_ref()
        if module is not None and alive is not None and _updates(optimizer, module):
            alive.step_ended()

    hook = register_optimizer_step_post_hook(updated)
    # models are thrown away without `detach`, and the registry of torch is global
    weakref.finalize(listener, hook.remove)
    return hook.remove


def _updates(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])
