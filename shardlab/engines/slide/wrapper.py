"""The slide engine for anybody's training script."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shardlab.comm.device import device_of
from shardlab.comm.names import parameter_names
from shardlab.core.errors import UserError
from shardlab.core.files import atomic
from shardlab.core.strategy import parse_strategy
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.slide.engine import SlideEngine

_FILE = "slide.safetensors"
_SCALE = "loss_scale"


@dataclass(frozen=True)
class SlideConfig:
    """How `SlideFSDP` trains; AdamW has the betas of language models, (0.9, 0.95)."""

    learning_rate: float = 1e-4
    weight_decay: float = 0.1
    clip: float | None = 1.0
    """largest global gradient norm. With one, updates run beside the next forward pass; without,
    beside backward, and a gradient that is not finite is an error"""
    accumulation: int = 1
    """calls that make up a step"""
    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """what the device computes in; parameters are updated in float32"""
    activation_checkpointing: Literal["none", "selective", "full"] = "full"
    activations: Literal["device", "memory", "disk"] = "device"
    """where the inputs of checkpointed layers wait for backward"""
    window: int = 2
    """layers that the device has memory for at a time"""
    param_transfer: Literal["full", "shard"] = "full"
    grad_sync: Literal["gpu_reduce", "cpu_reduce"] = "cpu_reduce"
    moments: Literal["memory", "disk"] = "memory"
    """where those of AdamW are between updates"""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """what they are kept in; with bf16 second moments are rounded by chance"""
    device: str | None = None
    """that computes; by default the current GPU where the process group has NCCL, else the CPU"""


class SlideFSDP:
    """Trains a model that does not fit the device: main memory holds it, the device a window of it.

    All ranks of the default process group call the same methods in the same order, each with its
    own samples; those of one machine share its memory. Without a process group a rank is alone.

    Args:
        model: a causal language model, or another with a list of blocks, whose outputs have a
            `loss`. In float32 on the CPU, the same on all ranks. It is taken apart.

    Raises:
        UserError: in one line: a setting that has no meaning, a model without blocks or with
            frozen parameters, too little memory.
    """

    def __init__(self, model: nn.Module, config: SlideConfig | None = None) -> None:
        self.config = config or SlideConfig()
        self.learning_rate = self.config.learning_rate
        """of the steps that begin from now on"""
        self.gradient_norm: float | None = None
        """of the last step, before clipping"""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self._group = dist.distributed_c10d._get_default_group()
        # writing may take longer than a rank waits for another in a step
        self._patient = dist.new_group(backend="gloo")
        self._check(model)
        self._names = parameter_names(model).values()
        self._buffers = [name for name, _ in model.named_buffers() if name in model.state_dict()]
        self._model = model
        self._engine = self._build(model)
        self.module = self._engine.module
        self._calls = 0

    def __call__(self, given: Mapping[str, Any] | None = None, /, **batch: Any) -> Any:
        """Forward and backward; the call that completes a step starts its updates, too.

        Without gradients (`torch.no_grad`) forward alone.

        Args:
            given, batch: what the model takes by name, on any device, as a mapping or otherwise.

        Returns:
            what the model returns, whose `loss` is that of these samples.
        """
        device = self._engine.device
        batch = {name: _moved(value, device) for name, value in {**(given or {}), **batch}.items()}
        if not torch.is_grad_enabled():
            return self.module(**batch)
        count = self.config.accumulation
        self._engine.begin(self._calls % count, count, self.learning_rate)
        output = self._engine.compute(lambda: self._forward_backward(batch))
        self._calls += 1
        if self._calls % count == 0:
            self.gradient_norm, _ = self._engine.end()
        return output

    def synchronize(self) -> None:
        """Returns when all updates are done, on all ranks; raises what went wrong."""
        self._engine.synchronize()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the parameters in float32 and of the buffers, by the names of the model."""
        own = self._engine.in_main_memory()["parameter"]
        whole = {names[0]: own[names[0]].clone() for names in self._names}
        tied = {other: whole[names[0]] for names in self._names for other in names[1:]}
        buffers = {
            name: self._model.get_buffer(name).to("cpu", copy=True) for name in self._buffers
        }
        return {**whole, **tied, **buffers}

    def save(self, folder: str | Path) -> None:
        """Writes parameters and optimizer states for `load`, between steps; whole or not at all."""
        self._between_steps("save")
        state = self._engine.in_main_memory()
        if dist.get_rank(self._group) == 0:
            tensors = {
                f"{kind}.{name}": t for kind, named in state.items() for name, t in named.items()
            }
            extra = self._engine.rank_state()["extra"]
            with atomic(folder) as temporary:
                temporary.mkdir()
                save_file({**tensors, **extra}, temporary / _FILE)
        dist.barrier(self._patient)

    def load(self, folder: str | Path) -> None:
        """Continues from what `save` wrote, with any number of ranks, which all see the folder.

        Raises:
            UserError: there is none, or that of another model.
        """
        self._between_steps("load")
        path, state = Path(folder) / _FILE, self._engine.in_main_memory()
        dist.barrier(self._patient)
        try:
            with safe_open(path, "pt") as file:
                self._take(file, state)
        except (OSError, SafetensorError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise UserError(
                f"{path}: not what SlideFSDP.save wrote of this model ({why})"
            ) from error
        dist.barrier(self._patient)

    def _take(self, file: Any, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The ranks of a node share the reading of what they share."""
        rank, world_size = self._engine.ranks.rank, self._engine.ranks.world_size
        for kind, named in state.items():
            for number, (name, tensor) in enumerate(named.items()):
                if kind == "step" or number % world_size == rank:
                    tensor.copy_(file.get_tensor(f"{kind}.{name}"))
        extra = {key: file.get_tensor(key) for key in file.keys() if key == _SCALE}  # noqa: SIM118
        before = self._engine.rank_state()
        self._engine.load_rank_state({**before, "extra": extra or before["extra"]})

    def _forward_backward(self, batch: dict[str, Any]) -> Any:
        with self._engine.sliding:
            output = self.module(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            raise UserError("SlideFSDP: the model returns no loss: give it labels")
        (loss * (self._engine.loss_scale / self.config.accumulation)).backward()
        output.loss = loss.detach()
        return output

    def _between_steps(self, what: str) -> None:
        if self._calls % self.config.accumulation:
            raise UserError(
                f"SlideFSDP.{what}: in the middle of a step: call it after the last one"
            )

    def _check(self, model: nn.Module) -> None:
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        if frozen:
            raise UserError(f"SlideFSDP: {frozen[0]} is frozen, and all parameters are updated")
        if getattr(model, "is_gradient_checkpointing", False):
            raise UserError(
                "SlideFSDP: the model checkpoints its layers itself: call "
                "gradient_checkpointing_disable() and set activation_checkpointing"
            )
        wide = {p.dtype for p in model.parameters()}
        if wide != {torch.float32}:
            raise UserError("SlideFSDP: give a model in float32; param_dtype is what computes")

    def _build(self, model: nn.Module) -> SlideEngine:
        config = self.config
        computation = ("param_dtype", "activation_checkpointing", "activations")
        keys = (*computation, "window", "param_transfer", "grad_sync", "moments", "moment_dtype")
        document = {"engine": "slide", **{key: getattr(config, key) for key in keys}}
        strategy = parse_strategy(document, "SlideConfig")
        device = config.device or device_of(self._group)
        optimization = Optimization(config.weight_decay, config.clip)
        engine = build_engine(
            model, strategy, optimization, self._group, device=torch.device(device)
        )
        assert isinstance(engine, SlideEngine)
        return engine


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
