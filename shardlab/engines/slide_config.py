"""Settings of `SlideFSDP`, and its requirements of models and outputs, each with the fix."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardlab.config.schema import Betas
from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.torch_private import is_compiled
from shardlab.engines.base import Optimization
from shardlab.models.parts import transformer_blocks
from shardlab.strategy.document import Strategy, parse_strategy


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
    """where activations are kept for backward"""
    window: int = 2
    """layers that the device has memory for at a time"""
    param_transfer: Literal["full", "shard"] = "full"
    grad_sync: Literal["gpu_reduce", "cpu_reduce"] = "cpu_reduce"
    gradients: str | Mapping[str, Any] = "none"
    """codec of the gradients that ranks send to each other, as `shardlab.attach` takes them by name
    or mapping"""
    error_feedback: bool = False
    """add what was not sent to the next gradient of the same layer"""
    weights: str | Mapping[str, Any] = "none"
    """codec of the parameters that ranks gather, where param_transfer is "shard" (see `attach`)"""
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
        keys = (*computation, "window", "param_transfer", "grad_sync", "moment_dtype")
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


_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Numbers(Document):
    """Settings that are not part of a strategy."""

    learning_rate: _Finite
    betas: Betas
    eps: _Finite
    weight_decay: _Finite
    clip: float | None = Field(gt=0)
    accumulation: int = Field(ge=1)
    seed: int


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be streamed.

    Raises:
        UserError: in one line.
    """
    parameters = dict(model.named_parameters())
    if is_compiled(model):
        raise UserError("SlideFSDP: the model is compiled, for parameters that stay: do not")
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    if sharded or isinstance(model, DistributedDataParallel):
        raise UserError("SlideFSDP: the model is distributed already: give what was wrapped")
    if not any(p.requires_grad for p in parameters.values()):
        raise UserError("SlideFSDP: no parameter is trained: set requires_grad of some")
    if any(p.numel() > 1 and not any(p.stride()) for p in parameters.values()):
        raise UserError("SlideFSDP: the model is in another SlideFSDP already: give a new one")
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu" or parameter.dtype is not torch.float32:
            raise UserError(
                f"SlideFSDP: {name} is {parameter.dtype} on {parameter.device}: give a model in "
                "float32 on the CPU; param_dtype and device are what computes"
            )
    try:
        transformer_blocks(model)
    except UserError:
        raise UserError(
            f"SlideFSDP: {type(model).__name__} has no list of blocks (nn.ModuleList) that could "
            "be streamed: train it as it is"
        ) from None


def refuse_state_dicts(model: nn.Module) -> None:
    """Refuse the model's own state dicts: outside of their use its parameters are NaN."""

    def refuse(*_: Any) -> NoReturn:
        raise UserError(
            "state_dict: the model is in SlideFSDP, which has its parameters in host memory: take "
            "SlideFSDP.state_dict(), on all ranks; load before SlideFSDP takes the model, or "
            "continue with SlideFSDP.load(folder)"
        )

    for module in model.modules():
        module.register_state_dict_pre_hook(refuse)
        module.register_load_state_dict_pre_hook(refuse)


def loss_of(output: Any) -> Tensor:
    """Return the loss: the output itself, its `loss`, or the first of a tuple.

    Raises:
        UserError: there is none that backward could begin with.
    """
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple) and not hasattr(output, "loss"):
        loss = output[0]
    else:
        loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UserError(
            "SlideFSDP: the model returns no loss, one number that is attached to its graph: give "
            "it labels"
        )
    return loss


def end_graph(loss: Tensor) -> None:
    """Replace the loss's graph in place: a kept output keeps none, and backward is refused."""
    if loss._base is None:  # a view cannot be detached in place
        anchor = torch.empty(0, requires_grad=True)
        _BackwardHasRun.apply(loss.detach_(), anchor)  # type: ignore[no-untyped-call]


class _BackwardHasRun(torch.autograd.Function):
    """Identity, whose backward says that there is nothing left to do."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, _: Tensor) -> Tensor:
        ctx.mark_dirty(loss)
        return loss

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise UserError(
            "SlideFSDP: the call that returned this loss has run backward: remove loss.backward()"
        )


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn off caches of keys and values, which training never reads."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:  # the user's model generates with them
        for config in caching:
            config.use_cache = True
