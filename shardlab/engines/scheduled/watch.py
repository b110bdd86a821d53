"""Tells a schedule when the units of a model are used and when their gradients are there."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

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


class Trained(Protocol):
    """A unit, as far as its gradients go."""

    name: str

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """By name."""


AnyUnit = TypeVar("AnyUnit", bound=Trained)
AnyUnitHeard = TypeVar("AnyUnitHeard", bound=Trained, contravariant=True)


class Accumulates(Protocol[AnyUnitHeard]):
    """Hears of gradients."""

    def accumulated(self, unit: AnyUnitHeard) -> None:
        """One more parameter of a unit has its gradient."""


class Scheduled(Protocol[AnyUnitHeard]):
    """Has a schedule, which may change."""

    @property
    def schedule(self) -> Accumulates[AnyUnitHeard]:
        """That of the moment."""


class MissingGradients:
    """How many parameters of each unit have no gradient yet in a backward pass."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def expect(self, units: Iterable[Trained]) -> None:
        """Those of all parameters that are trained."""
        self._left = {
            unit.name: sum(p.requires_grad for p in unit.parameters.values()) for unit in units
        }

    def arrived(self, unit: Trained) -> bool:
        """Counts one; returns whether none is missing any more."""
        self._left[unit.name] -= 1
        assert self._left[unit.name] >= 0, f"{unit.name}: a gradient after its backward"
        return self._left[unit.name] == 0

    def of(self, unit: Trained) -> bool:
        """Whether some of a unit are still missing."""
        return self._left[unit.name] > 0

    def give_up(self, unit: Trained) -> bool:
        """Expects no more of a unit; returns whether some were missing."""
        some = self.of(unit)
        self._left[unit.name] = 0
        return some


def watch(modules: Sequence[nn.Module], index: int, schedule: Callable[[], Uses]) -> None:
    """Calls the schedule of the moment before and after each use of a unit.

    Args:
        modules: of the unit, in the order of their use.
    """
    modules[0].register_forward_pre_hook(lambda *_: schedule().before_forward(index))
    modules[-1].register_forward_hook(lambda *_: schedule().after_forward(index))
    for module in modules:
        module.register_forward_hook(partial(_used, index, schedule))


def watch_gradients(units: Iterable[AnyUnit], owner: Scheduled[AnyUnit]) -> None:
    """Calls the schedule of the moment for each parameter whose gradient is there.

    The hooks hold neither: autograd keeps them where Python's collector does not look, so nothing
    of what they hold would ever be freed.
    """
    for unit in units:
        heard = partial(_accumulated, weakref.ref(owner), weakref.ref(unit))
        for parameter in unit.parameters.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(heard)


def _accumulated(
    owner: "weakref.ref[Scheduled[AnyUnit]]", unit: "weakref.ref[AnyUnit]", _: Tensor
) -> None:
    here, whose = owner(), unit()
    if here is not None and whose is not None:  # the model may outlive both
        here.schedule.accumulated(whose)


def _used(
    index: int, schedule: Callable[[], Uses], module: nn.Module, inputs: Any, output: Any
) -> None:
    for tensor in with_gradient(output):
        tensor.register_hook(lambda _: schedule().before_backward(index))


def with_gradient(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returned that backward brings a gradient for."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            yield tensor
