"""Initial weights of a model, part by part, so that no process has to hold all of them."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers import PreTrainedModel

from shardlab.core.errors import UserError


class Weights(ABC):
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

    def __init__(self, model: PreTrainedModel) -> None:
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


class RandomWeights(Weights):
    """Random weights as the family of the model draws them, by its `_init_weights` (transformers).

    The direct tensors of a module are drawn separately, from a random stream seeded by (seed, name
    of the module), while the rest of the model is on the meta device. Then the modules around it
    are initialized, as in `PreTrainedModel.initialize_weights`: GPT-2's attention draws the weight
    of its projection again.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        super().__init__(model)
        self._seed = seed

    def values(self, names: Iterable[str]) -> dict[str, Tensor]:  # noqa: D102
        owners: dict[str, dict[str, str]] = defaultdict(dict)
        for name in names:
            owner, _, inside = self._names[name][0].rpartition(".")
            owners[owner][name] = inside
        values = {}
        for owner, wanted in owners.items():
            drawn = self._draw(owner)
            values.update({name: drawn[inside] for name, inside in wanted.items()})
        return values

    def _draw(self, path: str) -> dict[str, Tensor]:
        """Return parameters and buffers directly in the module, by the last part of their names."""
        try:
            with _memory(self._model.get_submodule(path)) as drawn, self._stream(path):
                for module, family in self._outwards(path):
                    family._init_weights(module)
        except RuntimeError as error:  # of a size or a range that nobody would choose
            reason = " ".join(str(error).split())[:150]
            raise UserError(
                f"model: cannot make {path} of {type(self._model).__name__}: {reason}: correct the "
                "sizes and ranges in its config.json"
            ) from None
        for name, tensor in drawn.items():
            if _untouched(tensor):
                place = f"{path}.{name}".lstrip(".")
                raise UserError(
                    f"model: {type(self._model).__name__} does not say how {place} begins: "
                    "give its weights by model.pretrained"
                )
        return {name: tensor.data for name, tensor in drawn.items()}

    @contextmanager
    def _stream(self, path: str) -> Iterator[None]:
        digest = hashlib.sha256(f"{self._seed}:{path}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
            yield

    def _outwards(self, path: str) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
        """Return the module and those around it, each with the (sub)model that initialises it."""
        parts = path.split(".") if path else []
        around = [
            self._model.get_submodule(".".join(parts[:count]))
            for count in range(len(parts), -1, -1)
        ]
        for index, module in enumerate(around):
            yield module, next(m for m in around[index:] if isinstance(m, PreTrainedModel))


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


@contextmanager
def _memory(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Allocate the direct parameters and buffers of the module while the block runs."""
    # private dicts, replaced as a whole, so that the module gets back its own (tied) tensors
    kept = module._parameters, module._buffers
    parameters = {n: p if p is None else nn.Parameter(_blank(p)) for n, p in kept[0].items()}
    buffers = {n: b if b is None else _blank(b) for n, b in kept[1].items()}
    module._parameters, module._buffers = parameters, buffers
    try:
        yield {n: t for n, t in {**parameters, **buffers}.items() if t is not None}
    finally:
        module._parameters, module._buffers = kept


def _blank(tensor: Tensor) -> Tensor:
    """Fill with a value that no initialisation writes; tensors with a value keep it."""
    if not tensor.is_meta:
        return tensor.detach().clone()
    return torch.full(tensor.shape, _nothing(tensor.dtype), dtype=tensor.dtype, device="cpu")


def _untouched(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == _nothing(tensor.dtype)).any())


def _nothing(dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return False
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).min
