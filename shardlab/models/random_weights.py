"""Weights of a model, drawn at random as its family draws them."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardlab.core.errors import UserError
from shardlab.models.weights import WeightSource


class RandomWeights(WeightSource):
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
        with _memory(self._model.get_submodule(path)) as drawn, self._stream(path):
            for module, family in self._outwards(path):
                family._init_weights(module)
        for name, tensor in drawn.items():
            if _untouched(tensor):
                full_name = f"{path}.{name}".lstrip(".")
                raise UserError(
                    f"model: {type(self._model).__name__} does not say how {full_name} begins: "
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


@contextmanager
def _memory(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Allocate the direct parameters and buffers of the module while the block runs."""
    # private dicts, replaced as a whole, so that the module gets back its own (tied) tensors
    before = module._parameters, module._buffers
    parameters = {n: p if p is None else nn.Parameter(_blank(p)) for n, p in before[0].items()}
    buffers = {n: b if b is None else _blank(b) for n, b in before[1].items()}
    module._parameters, module._buffers = parameters, buffers
    try:
        yield {n: t for n, t in {**parameters, **buffers}.items() if t is not None}
    finally:
        module._parameters, module._buffers = before


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
