"""Sizes of a model and of its units under a strategy, on which memory and predictions depend."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from shardlab.core.files import read_json
from shardlab.models.blocks import block_shapes
from shardlab.models.build import build_model
from shardlab.models.memory import Sizes, UnitShape
from shardlab.models.parts import hidden_matrices, transformer_blocks
from shardlab.models.settings import Model, StepSize
from shardlab.models.units import (
    UnitPlan,
    checkpointing_modes,
    dtype_of,
    owned_parameters,
    plan_units,
    unit_sizes,
    uses_fp16,
)
from shardlab.results.result import UnitSize
from shardlab.strategy.document import CanonicalStrategy, Strategy
from shardlab.strategy.validation import check_optimizer


def sizes_of(
    model: PreTrainedModel, strategy: Strategy, step: StepSize, device: torch.device
) -> Sizes:
    """Return the sizes of a model that is not wrapped yet, on any device.

    Args:
        device: will compute; the type that `auto` stands for depends on it.

    Raises:
        UserError: the strategy does not fit the model or the optimizer.
    """
    full, config = strategy.canonical(), model.config.get_text_config()
    check_optimizer(full, step.optimizer)
    accumulation = full.accumulation or step.accumulation
    samples = step.samples // accumulation
    blocks = transformer_blocks(model)
    modes = checkpointing_modes(model, full)
    # of ddp there are buckets in place of units
    plans = [] if full.wrap is None else plan_units(model, full, device)
    return Sizes(
        parameters=_elements(model.parameters()),
        trained=_trained(model.parameters()),
        units=_shapes(model, plans),
        element_bytes=dtype_of(full.param_dtype, device).itemsize,
        checkpointing=tuple(modes.get(block, "none") for block in blocks),
        width=config.hidden_size,
        blocks=block_shapes(model, blocks, device),
        vocabulary=config.vocab_size,
        tokens=samples * step.sequence_length,
        sequence_length=step.sequence_length,
        accumulation=accumulation,
        matrices=_elements(hidden_matrices(model)) if step.optimizer == "muon" else 0,
        holding=step.clip is not None or uses_fp16(full, device),
    )


def _shapes(model: nn.Module, plans: list[UnitPlan]) -> tuple[UnitShape, ...]:
    """Return the units of the plans; a parameter that blocks share belongs to the first of them."""
    owned = [parameters.values() for _, parameters in owned_parameters(model, plans)[1:]]
    return tuple(
        UnitShape(
            elements=_elements(parameters),
            trained=_trained(parameters),
            kept=not plan.reshard_after_forward,
            element_bytes=plan.param_dtype.itemsize,
        )
        for plan, parameters in zip(plans, owned, strict=True)
    )


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _trained(parameters: Iterable[nn.Parameter]) -> int:
    return _elements(parameter for parameter in parameters if parameter.requires_grad)


class ModelShapes:
    """Reader of a model; strategies that wrap it alike share what was read.

    Args:
        model: not wrapped; it may be on the meta device.
        on_gpu: whether they compute on GPUs, of which none is needed here.
    """

    def __init__(self, model: PreTrainedModel, step: StepSize, on_gpu: bool = False) -> None:
        self._model, self._step, self.on_gpu = model, step, on_gpu
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self.layers = len(transformer_blocks(model))
        self.samples = step.samples
        self._sizes: dict[object, Sizes] = {}
        self._units: dict[object, list[UnitSize]] = {}

    @classmethod
    def of(cls, model: Model, step: StepSize, tokens: Path, on_gpu: bool) -> "ModelShapes":
        """Return the reader of the model that an experiment trains.

        Args:
            tokens: folder of its token shards.
            on_gpu: see above.

        Raises:
            UserError: the data or the model is absent, or they do not fit.
        """
        data = read_json(tokens / "manifest.json", "run shardlab tokenize")
        sizes = data["vocabulary"], step.sequence_length, data["end_of_text"]
        return cls(build_model(model, *sizes, seed=0).module, step, on_gpu)

    def sizes(self, strategy: CanonicalStrategy) -> Sizes:
        """Return the sizes that memory depends on.

        Raises:
            UserError: the strategy does not fit the model.
        """
        s = strategy
        key = (*_wrapping(s), s.activation_checkpointing, s.accumulation, s.param_dtype)
        if key not in self._sizes:
            self._sizes[key] = sizes_of(self._model, strategy, self._step, self._device)
        return self._sizes[key]

    def units(self, strategy: CanonicalStrategy) -> list[UnitSize]:
        """Return what the strategy gathers or reduces together, in order of use."""
        key = _wrapping(strategy)
        if key not in self._units:
            self._units[key] = unit_sizes(self._model, strategy, self._device)
        return self._units[key]


def _wrapping(s: CanonicalStrategy) -> tuple[object, ...]:
    # of replicas that train alone the layers are units in place of buckets
    buckets = (s.bucket_mb, s.sync is None)
    return s.wrap, s.wrap_size, *buckets, s.reshard_after_forward, s.overrides
