"""Sizes and units of a model under any strategy, for a search that looks at thousands."""

import torch
from transformers import PreTrainedModel

from shardlab.experiment.schema import Train
from shardlab.memory.sizes import Sizes
from shardlab.models.parts import transformer_blocks
from shardlab.records.timing import UnitSize
from shardlab.strategy.strategy import CanonicalStrategy
from shardlab.units.sizes import sizes_of
from shardlab.units.units import unit_sizes

_CPU = torch.device("cpu")


class ModelShapes:
    """Reader of a model; strategies that wrap it alike share what was read.

    Args:
        model: not wrapped; it may be on the meta device.
        train: whose ranks see the samples.
    """

    def __init__(self, model: PreTrainedModel, train: Train) -> None:
        self._model, self._train = model, train
        self.layers = len(transformer_blocks(model))
        self.samples = train.batch_size * train.accumulation
        self._sizes: dict[object, Sizes] = {}
        self._units: dict[object, list[UnitSize]] = {}

    def sizes(self, strategy: CanonicalStrategy) -> Sizes:
        """Return the sizes that memory depends on.

        Raises:
            UserError: the strategy does not fit the model.
        """
        s = strategy
        key = (*_wrapping(s), s.activation_checkpointing, s.accumulation, s.param_dtype)
        if key not in self._sizes:
            self._sizes[key] = sizes_of(self._model, strategy, self._train, _CPU)
        return self._sizes[key]

    def units(self, strategy: CanonicalStrategy) -> list[UnitSize]:
        """Return what the strategy gathers or reduces together, in order of use."""
        key = _wrapping(strategy)
        if key not in self._units:
            self._units[key] = unit_sizes(self._model, strategy, _CPU)
        return self._units[key]


def _wrapping(s: CanonicalStrategy) -> tuple[object, ...]:
    return s.wrap, s.wrap_size, s.bucket_mb, s.reshard_after_forward, s.overrides
