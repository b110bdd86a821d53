"""The slide engine for anybody's training script."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardlab.comm.device import device_of
from shardlab.comm.names import parameter_names
from shardlab.core.errors import UserError
from shardlab.engines.base import State
from shardlab.engines.build import build_engine
from shardlab.engines.slide import saving
from shardlab.engines.slide.config import SlideConfig, check_learning_rate
from shardlab.engines.slide.engine import SlideEngine
from shardlab.engines.slide.model_checks import check_model, computing_device
from shardlab.engines.slide.outputs import drop_graph, loss_of


class SlideFSDP:
    """Trains a model that does not fit the device: main memory holds it, the device a window of it.

    All ranks of the default process group call the same methods in the same order, each with its
    own samples; those of one machine share its memory. Without a process group a rank is alone.

    Args:
        model: a causal language model, or another with a list of blocks, that returns its loss:
            alone, first of several, or as `loss`. In float32 on the CPU, the same on all ranks.
            It is taken apart: from now on it computes here, and elsewhere without gradients alone.

    Raises:
        UserError: in one line: a setting that has no meaning, a model without blocks or with
            frozen parameters, too little memory.
    """

    def __init__(self, model: nn.Module, config: SlideConfig | None = None) -> None:
        if not isinstance(config, SlideConfig | None):
            raise UserError(f"SlideFSDP: config is a {type(config).__name__}: give a SlideConfig")
        check_model(model)
        self.config = config or SlideConfig()
        self.learning_rate = self.config.learning_rate
        """of the steps that begin from now on"""
        self.gradient_norm: float | None = None
        """of the last step, before clipping"""
        self.applied: bool | None = None
        """whether the last step was: a gradient that is not finite is left out, on all ranks"""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self._group = dist.distributed_c10d._get_default_group()
        # writing may take longer than a rank waits for another in a step
        self._patient = dist.new_group(backend="gloo")
        self._names = parameter_names(model).values()
        self._buffers = [name for name, _ in model.named_buffers() if name in model.state_dict()]
        self._model = model
        self._engine = self._build(model)
        self.ledger = self._engine.ledger
        """what moved between ranks, see `shardlab.attach`"""
        self.module = self._engine.module
        self._calls = 0

    def __call__(self, given: Mapping[str, Any] | None = None, /, **batch: Any) -> Any:
        """Forward and backward; the call that completes a step starts its updates, too.

        Without gradients (`torch.no_grad`) forward alone.

        Args:
            given, batch: what the model takes by name, on any device, as a mapping or otherwise.

        Returns:
            what the model returns, whose loss is that of these samples.

        Raises:
            UserError: a batch without names, no loss, or a learning rate that is none.
        """
        if not isinstance(given, Mapping | None):
            raise UserError("SlideFSDP: give a batch by name: sliding(input_ids=..., labels=...)")
        device = self._engine.device
        batch = {name: _moved(value, device) for name, value in {**(given or {}), **batch}.items()}
        if not torch.is_grad_enabled():
            return self.module(**batch)
        count = self.config.accumulation
        check_learning_rate(self.learning_rate)
        self._engine.begin(self._calls % count, count, self.learning_rate)
        output = self._engine.compute(lambda: self._forward_backward(batch))
        self._calls += 1
        if self._calls % count == 0:
            self.gradient_norm, self.applied = self._engine.end()
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
        """Writes all that `load` continues from, between steps; whole or not at all.

        Raises:
            UserError: a rank cannot write; on all ranks.
        """
        self._between_steps("save")
        state = self._engine.in_main_memory()
        saving.write(Path(folder), state, self._engine.rank_state(), self._patient)

    def load(self, folder: str | Path) -> None:
        """Continues from what `save` wrote, with any number of ranks, which all see the folder.

        What codecs held back goes to the new ranks, as `shardlab.merge_states` does it.

        Raises:
            UserError: there is none, that of another model, or a rank cannot read; on all ranks.
        """
        self._between_steps("load")
        folder, group = Path(folder), self._patient
        failed = f"{folder}: cannot be loaded"
        state, before = self._engine.in_main_memory(), self._engine.rank_state()
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        # nobody writes to memory before all ranks have found theirs
        with saving.together(group, failed):
            saving.check(folder, state)
            told = saving.communication(folder, world_size, rank, self.config.error_feedback)
        with saving.together(group, failed):
            extra = saving.fill(folder, self._own_share(state)) or before["extra"]
            self._engine.load_rank_state({"communication": told, "extra": extra})
        self._engine.take_in()

    def _own_share(self, state: State) -> State:
        """What this rank reads of what the ranks of its node share; its steps are its own."""
        rank, world_size = self._engine.ranks.rank, self._engine.ranks.world_size
        return {
            kind: {
                name: tensor
                for number, (name, tensor) in enumerate(named.items())
                if kind == "step" or number % world_size == rank
            }
            for kind, named in state.items()
        }

    def _forward_backward(self, batch: dict[str, Any]) -> Any:
        with self._engine.sliding, _without_cache(self._model):
            output = self.module(**batch)
        loss = loss_of(output)
        (loss * (self._engine.loss_scale / self.config.accumulation)).backward()
        drop_graph(loss)
        return output

    def _between_steps(self, what: str) -> None:
        if self._calls % self.config.accumulation:
            raise UserError(
                f"SlideFSDP.{what}: in the middle of a step: call it after the last one"
            )

    def _build(self, model: nn.Module) -> SlideEngine:
        config = self.config
        ours = config.activation_checkpointing != "none"
        if ours and isinstance(model, PreTrainedModel) and model.is_activation_checkpointing:
            model.activation_checkpointing_disable()  # layers would be computed three times
        device = computing_device(config.device, device_of(self._group))
        strategy, optimization = config.strategy(), config.optimization()
        engine = build_engine(
            model, strategy, optimization, self._group, config.seed, device=device
        )
        assert isinstance(engine, SlideEngine)
        return engine


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Keys and values would be kept for nothing, twice where layers are computed again."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
