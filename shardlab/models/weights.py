"""Source of the weights that a model begins with."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from copy import deepcopy
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils import swap_tensors

if TYPE_CHECKING:  # engines of scripts that do without it name this contract
    from transformers import PreTrainedModel


class WeightSource(ABC):
    """Source of the initial value of every parameter and buffer of one model.

    Laws:
    - a value depends on the source, the seed and its name alone: not on the other requested names,
      their order or the rank;
    - tied parameters have one value, under each of their names;
    - `materialize` assigns what `values` returns;
    - only requested tensors are allocated, and the random state of the caller does not change.

    Names are those of the model before it is wrapped.

    Args:
        model: on the meta device; it may be taken apart afterwards.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = deepcopy(model)
        self._names = _all_names(self._model)

    @abstractmethod
    def values(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return full values of parameters and buffers on the CPU, for the caller to keep.

        Returns:
            float32, but for buffers of another type, by the names that were given.

        Raises:
            UserError: the source cannot be read, or does not fit the model.
        """

    def materialize(self, module: nn.Module, prefix: str = "") -> None:
        """Allocate and fill everything below `module` that is on the meta device.

        The tensors keep their identity, so that tied parameters stay tied, also with those outside
        of `module`. Tensors that are not on the meta device are not changed.

        Args:
            module: not sharded yet.
            prefix: its name in the model; empty for the model itself.
        """
        start = f"{prefix}." if prefix else ""
        tensors: dict[str, Tensor] = {
            **dict(module.named_parameters()),
            **dict(module.named_buffers()),
        }
        missing = {start + name: tensor for name, tensor in tensors.items() if tensor.is_meta}
        for name, value in self.values(missing).items():
            target = missing[name]
            assert type(target) in (Tensor, nn.Parameter), "weights come before sharding"
            if isinstance(target, nn.Parameter):
                value = nn.Parameter(value, target.requires_grad)
            swap_tensors(target, value)


def _all_names(model: nn.Module) -> dict[str, list[str]]:
    """Map every name of a parameter or buffer to all names of the same tensor, in order."""
    known: dict[int, list[str]] = {}
    names: dict[str, list[str]] = {}
    for tensors in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in tensors:
            names[name] = known.setdefault(id(tensor), [])
            names[name].append(name)
    return names
