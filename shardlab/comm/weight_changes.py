"""Changes of weights that exchanges would undo or miss, in one line each."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardlab.comm.outer_parameters import OuterUnit, digest
from shardlab.core.errors import UserError
from shardlab.models.names import plain


class WeightChanges:
    """Notices what a script does to the weights of a model, apart from training them.

    Args:
        units: of the trained parameters of `model`.
    """

    def __init__(self, model: nn.Module, units: Sequence[OuterUnit]) -> None:
        self._model, self._units = model, units
        # of all modules: a script may load a part of the model, or what torch.compile wraps
        self._hooks = [
            hook
            for module in model.modules()
            for hook in (
                module.register_load_state_dict_pre_hook(self._before_load),
                module.register_load_state_dict_post_hook(self._after_load),
            )
        ]
        self._loading: nn.Module | None = None
        """outermost module that is being loaded"""
        self.reset()

    def __deepcopy__(self, _: object) -> "WeightChanges":
        # hooks of a copy, such as an average, look at the model that trains
        return self

    def reset(self) -> None:
        """Take the weights as they are, and what is loaded before the next step, as right."""
        self._may_load, self._are_loaded = True, False
        self._trained: str | None = None
        """digest before the first load since the last step"""

    def step_ended(self) -> None:
        """Note that the weights are trained, and so are not to be replaced."""
        self._may_load, self._are_loaded, self._trained = False, False, None

    def check_loaded(self, step: int) -> None:
        """Refuse weights that were loaded since the last step, which exchanges would undo."""
        if self._are_loaded:
            raise UserError(
                f"sync: weights were loaded after step {step}, and exchanges would undo that: load "
                "the handle's state of the same step, too, or detach() and attach again "
                "(DistributedDataParallel: to a new wrapper)"
            )

    def check_trained(self) -> None:
        """Refuse parameters that were frozen or unfrozen since `attach`."""
        # by name: between forward and backward FSDP2 has others in their places
        trained = {plain(n) for n, p in self._model.named_parameters() if p.requires_grad}
        known = {name for unit in self._units for name in unit.parameters}
        for name in sorted(trained ^ known):
            raise UserError(
                f"sync: {name} was frozen or unfrozen after attach: do so before it, or detach() "
                "and attach again"
            )

    def check_present(self) -> None:
        """Refuse parameters in place of those that were there at `attach`."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation may have left what it has gathered
        present = {id(parameter) for parameter in self._model.parameters()}
        for unit in self._units:
            for name, parameter in unit.parameters.items():
                if id(parameter) not in present:
                    raise UserError(
                        f"sync: {name} was replaced after attach: attach after that, or load "
                        "weights without assign=True"
                    )

    def remove(self) -> None:
        """Look at the weights no more."""
        for hook in self._hooks:
            hook.remove()

    def _before_load(self, module: nn.Module, *_: object) -> None:
        self._loading = self._loading or module
        if not self._may_load and self._trained is None:
            self._trained = self._digest()

    def _after_load(self, module: nn.Module, _: object) -> None:
        if module is not self._loading:
            return
        self._loading = None
        if not self._may_load:
            self.check_present()
            # a script may put an average in their place, and then the same weights back
            self._are_loaded = self._digest() != self._trained

    def _digest(self) -> str:
        return digest(unit.flat() for unit in self._units)
