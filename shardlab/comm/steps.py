"""When a step ends: an optimizer of torch updates parameters of the model.

Error feedback has to know, so that a step without an update can be taken back as a whole, however
many messages it took; so do random codecs of weights, since forward and backward are to see the
same ones. The hook that torch offers is called for every optimizer of the process.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_COUNT = "weights.updates"


class Told(Protocol):
    """Whoever has to know."""

    def step_ended(self) -> None:
        """The parameters are updated."""


class Updates:
    """How often the parameters were updated: what is gathered in between are the same ones."""

    def __init__(self) -> None:
        self.count = 0

    def step_ended(self) -> None:
        """The parameters are updated."""
        self.count += 1

    def state_dict(self) -> dict[str, Tensor]:
        """The count, the same on all ranks."""
        return {_COUNT: torch.tensor(self.count)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from a saved count, where there is one."""
        self.count = int(state.get(_COUNT, 0))


def tell_steps(model: nn.Module, told: Told) -> Callable[[], None]:
    """Calls `told.step_ended()` after each update of `model`; returns how to stop that.

    Neither of the two is kept alive by it.
    """
    of_model = weakref.ref(model)
    of_told = weakref.ref(told)

    def updated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        module, listener = of_model(), of_told()
        if module is not None and listener is not None and _updates(optimizer, module):
            listener.step_ended()

    hook = register_optimizer_step_post_hook(updated)
    # nobody has to detach a model before throwing it away
    weakref.finalize(told, hook.remove)
    return hook.remove


def _updates(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    mine = {id(parameter) for parameter in model.parameters()}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
