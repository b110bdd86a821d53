"""Settings of `SlideFSDP`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from shardlab.core.document import AS_TUPLE, Document, validate
from shardlab.core.errors import UserError
from shardlab.engines.common.base import Optimization
from shardlab.strategy.strategy import Strategy, parse_strategy


@dataclass(frozen=True)
class SlideConfig:
    """Settings of `SlideFSDP`, which trains by AdamW with the betas of language models.

    Raises:
        UserError: in one line: a setting that has no meaning.
    """

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    """largest global gradient norm. With one, updates overlap with the next forward pass; without,
    with backward, and a gradient that is not finite is an error"""
    accumulation: int = 1
    """calls that make up a step; each counts alike, however many samples it has"""
    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """of the parameters on the device; parameters are updated in float32"""
    activation_checkpointing: Literal["none", "selective", "full"] = "full"
    """replaces the model's own; "none" leaves the model's own as it is"""
    activations: Literal["device", "memory", "disk"] = "device"
    """where the inputs of layers that the engine checkpoints are kept for backward"""
    window: int = 2
    """layers that the device has memory for at a time"""
    param_transfer: Literal["full", "shard"] = "full"
    grad_sync: Literal["gpu_reduce", "cpu_reduce"] = "cpu_reduce"
    reduce_every_micro_batch: bool = False
    """with accumulation and cpu_reduce: the gradients of all ranks are added up after every call,
    so that host memory holds one sum instead of one for each rank"""
    gradients: str | Mapping[str, Any] = "none"
    """codec of the gradients that ranks send to each other, as `shardlab.attach` takes them by name
    or mapping"""
    error_feedback: bool = False
    """add what was not sent to the next gradient of the same layer"""
    weights: str | Mapping[str, Any] = "none"
    """codec of the parameters that ranks gather, where param_transfer is "shard" (see `attach`)"""
    moments: Literal["memory", "disk"] = "memory"
    """where those of AdamW are between updates"""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """of the moments; bf16 rounds second moments stochastically"""
    seed: int = 0
    """of stochastic rounding"""
    device: str | None = None
    """that computes; by default the current GPU where the process group has NCCL, else the CPU"""

    def __post_init__(self) -> None:
        numbers = {key: getattr(self, key) for key in _Numbers.model_fields}
        validate(_Numbers, numbers, "SlideConfig")
        self.strategy()

    def strategy(self) -> Strategy:
        """Return how the model computes and communicates."""
        computation = ("param_dtype", "activation_checkpointing", "activations")
        streaming = ("window", "param_transfer", "grad_sync", "reduce_every_micro_batch")
        keys = (*computation, *streaming, "moments", "moment_dtype")
        document = {key: getattr(self, key) for key in keys}
        gradients = {"codec": self.gradients, "error_feedback": self.error_feedback}
        codecs: dict[str, Any] = {"gradients": gradients}
        if self.weights != "none":
            codecs["weights"] = {"codec": self.weights}
        return parse_strategy({"engine": "slide", **document, **codecs}, "SlideConfig")

    def optimization(self) -> Optimization:
        """Return how the model is updated."""
        return Optimization(
            weight_decay=self.weight_decay,
            clip=self.clip,
            betas=self.betas,
            eps=self.eps,
            accumulation=self.accumulation,
        )

    def device_or(self, default: torch.device) -> torch.device:
        """Return the device that computes.

        Raises:
            UserError: this machine has none of that name.
        """
        name = self.device
        if name is None:
            return default
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            raise UserError(
                f"SlideConfig.device: {name!r} is no device: 'cpu', 'cuda' or 'cuda:N'"
            ) from None
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise UserError(f"SlideConfig.device: {name}: this machine has {gpus} GPUs")
        if device.type not in ("cpu", "cuda"):
            raise UserError(f"SlideConfig.device: {name}: the engine computes on 'cpu' or 'cuda'")
        return device


def check_learning_rate(value: Any) -> None:
    """Refuse a value that is no learning rate.

    Raises:
        UserError: in one line.
    """
    validate(_Finite, value, "SlideFSDP.learning_rate")


_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Numbers(Document):
    """Settings that are not part of a strategy."""

    learning_rate: _Finite
    betas: Annotated[tuple[_Beta, _Beta], AS_TUPLE]
    eps: _Finite
    weight_decay: _Finite
    clip: float | None = Field(gt=0)
    accumulation: int = Field(ge=1)
    seed: int
