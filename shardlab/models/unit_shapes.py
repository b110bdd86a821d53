"""Sizes and units of a model under any strategy, for a search that looks at thousands."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from shardlab.config.model_and_data import Model
from shardlab.config.schema import Train
from shardlab.config.strategy import CanonicalStrategy
from shardlab.config.timing_record import UnitSize
from shardlab.core.files import read_json
from shardlab.models.build import build_model
from shardlab.models.memory_sizes import Sizes
from shardlab.models.parts import transformer_blocks
from shardlab.models.unit_sizes import sizes_of
from shardlab.models.units import unit_sizes


class ModelShapes:
    """Reader of a model; strategies that wrap it alike share what was read.

    Args:
        model: not wrapped; it may be on the meta device.
        train: whose ranks see the samples.
        on_gpu: whether they compute on GPUs, of which none is needed here.
    """

    def __init__(self, model: PreTrainedModel, train: Train, on_gpu: bool = False) -> None:
        self._model, self._train, self.on_gpu = model, train, on_gpu
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self.layers = len(transformer_blocks(model))
        self.samples = train.batch_size * train.accumulation
        self._sizes: dict[object, Sizes] = {}
        self._units: dict[object, list[UnitSize]] = {}

    @classmethod
    def of(cls, model: Model, train: Train, tokens: Path, on_gpu: bool) -> "ModelShapes":
        """Return the reader of the model that an experiment trains.

        Args:
            tokens: folder of its token shards.
            on_gpu: see above.

        Raises:
            UserError: the data or the model is absent, or they do not fit.
        """
        data = read_json(tokens / "manifest.json", "run python -m stages.tokenize")
        sizes = data["vocabulary"], train.sequence_length, data["end_of_text"]
        return cls(build_model(model, *sizes, seed=0).module, train, on_gpu)

    def sizes(self, strategy: CanonicalStrategy) -> Sizes:
        """Return the sizes that memory depends on.

        Raises:
            UserError: the strategy does not fit the model.
        """
        s = strategy
        key = (*_wrapping(s), s.activation_checkpointing, s.accumulation, s.param_dtype)
        if key not in self._sizes:
            self._sizes[key] = sizes_of(self._model, strategy, self._train, self._device)
        return self._sizes[key]

    def units(self, strategy: CanonicalStrategy) -> list[UnitSize]:
        """Return what the strategy gathers or reduces together, in order of use."""
        key = _wrapping(strategy)
        if key not in self._units:
            self._units[key] = unit_sizes(self._model, strategy, self._device)
        return self._units[key]


def _wrapping(s: CanonicalStrategy) -> tuple[object, ...]:
    return s.wrap, s.wrap_size, s.bucket_mb, s.reshard_after_forward, s.overrides
