"""Tells a schedule when the units of a model are used."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Uses(Protocol):
    """Hears of every use of the unit with a number."""

    def before_forward(self, index: int) -> None:
        """It is about to compute."""

    def after_forward(self, index: int) -> None:
        """It has computed."""

    def before_backward(self, index: int) -> None:
        """The gradient of what it returned is there; once for each tensor of that."""


def watch(modules: Sequence[nn.Module], index: int, schedule: Callable[[], Uses]) -> None:
    """Calls the schedule of the moment before and after each use of a unit.

    Args:
        modules: of the unit, in the order of their use.
    """
    modules[0].register_forward_pre_hook(lambda *_: schedule().before_forward(index))
    modules[-1].register_forward_hook(lambda *_: schedule().after_forward(index))
    for module in modules:
        module.register_forward_hook(partial(_used, index, schedule))


def _used(
    index: int, schedule: Callable[[], Uses], module: nn.Module, inputs: Any, output: Any
) -> None:
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: schedule().before_backward(index))
