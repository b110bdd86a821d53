"""Parameters of the model."""

from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from shardlab.core.document import Document
from shardlab.core.files import state_of
from shardlab.core.types import OptimizerName

GPT2_VOCABULARY = 50257


class StepSize(NamedTuple):
    """Size of a step on one rank."""

    batch_size: int
    """sequences per micro-batch"""
    sequence_length: int
    """tokens per sequence"""
    accumulation: int = 1
    """micro-batches per step"""
    clip: float | None = 1.0
    """maximum global gradient norm; None: none"""
    optimizer: OptimizerName = "adamw"

    @property
    def samples(self) -> int:
        """Sequences per step."""
        return self.batch_size * self.accumulation


class Shape(NamedTuple):
    """Layers, width and attention heads of a GPT-2."""

    layers: int
    width: int
    heads: int


PRESETS = {
    "tiny": Shape(2, 96, 4),
    "small": Shape(4, 128, 4),
    "4x176": Shape(4, 176, 4),
    "6x256": Shape(6, 256, 8),
    "8x576": Shape(8, 576, 9),
    "9x704": Shape(9, 704, 11),
    "20x1024": Shape(20, 1024, 16),
}


class Model(Document):
    """Model to train: a GPT-2 of any shape with random weights, or any causal language model of
    Hugging Face."""

    preset: Literal["tiny", "small", "4x176", "6x256", "8x576", "9x704", "20x1024"] | None = None
    """shape by its name: tiny is 2x96 (layers x width), small 4x128"""
    layers: int | None = Field(None, ge=1, le=1000)
    """transformer blocks; null: as the preset"""
    width: int | None = Field(None, ge=1, le=2**17)
    """elements per token between blocks; null: as the preset"""
    heads: int | None = Field(None, ge=1, le=2**17)
    """attention heads, a divisor of the width; null: as the preset"""
    pretrained: str | None = None
    """folder or name on the Hugging Face hub with config.json and safetensors files"""
    config: str | None = None
    """folder, config.json or name on the Hugging Face hub: its architecture with random weights"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """probability by which training drops elements, wherever the architecture does: of embeddings,
    of residual branches, of attention"""

    def meaning(self) -> dict[str, Any]:
        """Return the parameters that results depend on, as plain data; `dropout` is left out at its
        default, as in runs from before it."""
        return self.model_dump(mode="json", exclude=None if self.dropout else {"dropout"})

    @property
    def shape(self) -> Shape | None:
        """Shape of a GPT-2; None of a model of Hugging Face."""
        given = self.layers, self.width, self.heads
        if self.preset is None and None in given:
            return None
        base = given if self.preset is None else PRESETS[self.preset]
        return Shape(*(own or other or 0 for own, other in zip(given, base, strict=True)))

    @property
    def name(self) -> str:
        """Name of the model in records."""
        shape = self.shape
        if shape is None:
            return self.pretrained or self.config or ""
        known = {preset: name for name, preset in PRESETS.items()}
        return known.get(shape, f"{shape.layers}x{shape.width}, {shape.heads} heads")

    def state(self) -> str | None:
        """Return a digest that changes when a file of the model is written; None where it has none
        on this machine."""
        root = self.pretrained or self.config
        return state_of(Path(root)) if root and Path(root).exists() else None

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        changed = any(each is not None for each in (self.layers, self.width, self.heads))
        random = self.preset is not None or changed
        if random + (self.pretrained is not None) + (self.config is not None) != 1:
            raise ValueError(
                "give one of preset (which layers, width and heads may change), pretrained and "
                "config"
            )
        if random and self.shape is None:
            raise ValueError("give layers, width and heads, or a preset that they change")
        if self.shape is not None and self.shape.width % self.shape.heads:
            raise ValueError(
                f"width {self.shape.width} is no multiple of {self.shape.heads} heads: change one "
                "of them"
            )
        return self
