"""A module whose units are streamed through a window of device memory."""

from collections.abc import Callable, Container, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils import checkpoint

from shardlab.comm.collective import Collective, MakeCollective
from shardlab.core.errors import UserError
from shardlab.engines.scheduling import ScheduledModule, with_gradient
from shardlab.engines.slide.groups import RankGroups
from shardlab.engines.slide.schedule import Schedule
from shardlab.engines.slide.unit import SlideUnit
from shardlab.models.units import UnitPlan

P = ParamSpec("P")
Result = TypeVar("Result")


class SlideModule(ScheduledModule):
    """Wrapper of `model` whose units are on the device while they are used.

    `schedule` and `owner` are set after `attach`.

    Args:
        plans: its units, in the order of their use; what is left makes up the root.
        units: the root, then those of `plans`, unbound.
        checkpointed: blocks that backward recomputes: what autograd saves then is used at once.
    """

    schedule: Schedule
    owner: Callable[[], object]
    """the engine, as long as there is one"""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[UnitPlan],
        units: Sequence[SlideUnit],
        checkpointed: Container[nn.Module],
        groups: RankGroups,
    ) -> None:
        super().__init__(model, plans, units)
        self._units = units
        self._groups = groups
        self.gather: Collective | None = None
        self.reduce: Collective | None = None
        self.average: Collective | None = None
        # hooks, not `forward`: others call the model, too, as its `generate` does
        model.register_forward_pre_hook(lambda *_: self._begin())
        model.register_forward_hook(lambda *_: self.schedule.computed())
        for index, (plan, unit) in enumerate(zip(plans, units[1:], strict=True)):
            for module in plan.modules:
                if unit.frozen_shapes:
                    module.register_forward_hook(partial(self._returned, index))
                if module not in checkpointed:
                    module.forward = self._saving_positions(module.forward)

    def attach_collectives(  # noqa: D102
        self, gradients: MakeCollective, weights: MakeCollective, replicas: MakeCollective
    ) -> Callable[[], None]:
        before = self.gather, self.reduce, self.average
        groups = self._groups
        self.gather = None if groups.gathers is None else weights(groups.gathers)
        self.reduce = None if groups.reductions is None else gradients(groups.reductions)
        self.average = None if groups.across is None else replicas(groups.across)

        def detach() -> None:
            self.gather, self.reduce, self.average = before

        return detach

    def unit_names(self) -> dict[str, list[str]]:
        """Return the names of the trained parameters of each unit."""
        return {unit.name: list(unit.shapes) for unit in self._units}

    def _returned(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if [*with_gradient(output)]:
            self.schedule.returned(index)

    def _begin(self) -> None:
        if self.owner() is None:
            raise UserError(
                "slide: what trained the model is gone, and its memory with it: keep SlideFSDP as "
                "long as the model is used, or load its state_dict() into a new one"
            )
        if torch.is_grad_enabled() and not self.schedule.in_step:
            raise UserError(
                "slide: the model was called outside of a step, where its gradients would be lost: "
                "call what trains it (SlideFSDP), or use torch.no_grad()"
            )
        self.schedule.begin()

    def _saving_positions(self, forward: Callable[P, Result]) -> Callable[P, Result]:
        @wraps(forward)
        def saving(*args: P.args, **kwargs: P.kwargs) -> Result:
            _refuse_checkpoint()
            with self.schedule.window.saving_positions():
                return forward(*args, **kwargs)

        return saving


def _refuse_checkpoint() -> None:
    """Refuse a block within a checkpointed region.

    Our hooks would take what the block saves before those of the region, so nothing would be
    recomputed. torch has no public way to ask for the hooks that are active.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == checkpoint.__name__:
        raise UserError(
            "slide: the model calls its blocks within torch.utils.checkpoint, where nothing would "
            "be computed again: set activation_checkpointing: full"
        )
