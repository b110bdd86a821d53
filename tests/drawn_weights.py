"""Models whose initial weights a process draws once: drawing them takes as long as some steps."""

import functools
from collections.abc import Iterable
from pickle import dumps, loads  # by name: a test takes them from the library
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from shardlab.models.build import BuiltModel, build_model
from shardlab.models.weights import WeightSource


class DrawnWeights(WeightSource):
    """Copies of what another source has given once."""

    def __init__(self, model: PreTrainedModel, source: WeightSource) -> None:
        super().__init__(model)
        self._drawn = source.values(self._names)

    def values(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._drawn[name].clone() for name in names}


@functools.cache
def _built(*arguments: Any) -> tuple[bytes, DrawnWeights]:
    module, weights = build_model(*arguments)
    return dumps(module), DrawnWeights(module, weights)


def drawn_model(*arguments: Any) -> BuiltModel:
    """A model of its own with the weights of all that have the arguments of `build_model`."""
    # unpickled, which takes a sixth of the time of `deepcopy`
    module, weights = _built(*arguments)
    return BuiltModel(loads(module), weights)
