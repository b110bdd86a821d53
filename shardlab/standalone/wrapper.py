"""The slide engine for anybody's training script."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardlab.comm.names import parameter_names
from shardlab.core.errors import UserError
from shardlab.engines.build import build_engine
from shardlab.engines.common.base import State
from shardlab.engines.common.random_state import random_state, set_random_state
from shardlab.engines.common.state_files import in_host_memory
from shardlab.engines.slide.engine import SlideEngine
from shardlab.engines.slide.groups import twin
from shardlab.engines.slide.unit import FROZEN
from shardlab.standalone import saving
from shardlab.standalone.config import SlideConfig, check_learning_rate
from shardlab.standalone.model_checks import check_model, computing_device
from shardlab.standalone.outputs import drop_graph, loss_of
from shardlab.standalone.state_dicts import refuse_state_dicts
from shardlab.transport.object_collectives import device_of, run_or_fail_together


class SlideFSDP:
    """Trains a model that does not fit the device: host memory holds it, the device a window of it.

    All ranks of the default process group call the same methods in the same order, each with its
    own samples; those of one machine share its memory. Without a default process group it makes
    one, by the environment that a launcher sets or of this rank alone, which stays:
    `torch.distributed.destroy_process_group` ends it when the model has trained, before another one
    is initialised.

    Its way over a GPU has not been run yet; all tests are on CPUs.

    Parameters whose `requires_grad` is False stay as they are: host memory holds them once, in
    `param_dtype`, to which they are rounded at the start, without moments or gradients. Which ones
    are trained is decided before; another choice needs a new `SlideFSDP` of the same model, built
    anew with `state_dict()`.

    Args:
        model: a causal language model, or another with a list of blocks, that returns its loss:
            alone, first of several, or as `loss`. In float32 on the CPU, the same on all ranks.
            It is taken apart: from now on it computes here, and elsewhere without gradients alone.

    Raises:
        UserError: in one line: a setting that has no meaning, a model without blocks or without
            parameters to train, too little memory.
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
            _init_process_group()
        self._group = dist.distributed_c10d._get_default_group()
        # writing may take longer than a rank waits for another in a step
        self._patient = twin(self._group, timedelta(minutes=30))
        self._names = parameter_names(model).values()
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self._persistent = [name for name in model.state_dict() if name in buffers]
        self._model = model
        self._engine = self._build(model)
        refuse_state_dicts(model)
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
            UserError: a batch without names, no loss, a learning rate that is none, or a
                `requires_grad` that is not what it was at the start.
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
        """Copies of the parameters in float32 and of the buffers, by the names of the model.

        All of it on rank 0, nothing on the others, as torch's `StateDictOptions` has it with
        `full_state_dict` and `cpu_offload`; to be called by all ranks together.
        """
        state = self._engine.in_host_memory()
        if dist.get_rank(self._group) > 0:
            return {}
        own = state["parameter"] | state[FROZEN]
        whole = {n: own[n].to(torch.float32, copy=True) for n, *_ in self._names}
        tied = {other: whole[names[0]] for names in self._names for other in names[1:]}
        return {**whole, **tied, **in_host_memory(self._buffers())}

    def save(self, folder: str | Path) -> None:
        """Writes all that `load` continues from, between steps; whole or not at all.

        Buffers are those of rank 0. It replaces a folder that it has written, and no other.

        Raises:
            UserError: something else is there, or a rank cannot write; on all ranks.
        """
        self._between_steps("save")
        engine, folder = self._engine, saving.folder_of(folder, "SlideFSDP.save")
        state = engine.in_host_memory()  # first: threads change what ranks hold back until then
        own = engine.rank_state() | {"random": random_state(engine.device)}
        state |= {"buffer": in_host_memory(self._buffers()), "extra": own.pop("extra")}
        saving.write(folder, state, own, self._patient)

    def load(self, folder: str | Path) -> None:
        """Continues from what `save` wrote, with any number of ranks, which all see the folder.

        With the same number torch's random states of each rank are continued, too. Else what codecs
        held back goes to the new ranks, as `shardlab.merge_states` does it.

        Raises:
            UserError: there is none, it is damaged, of another model or of one with other frozen
                parameters, or a rank cannot read; on all ranks.
        """
        self._between_steps("load")
        folder, group = saving.folder_of(folder, "SlideFSDP.load"), self._patient
        failed = f"{folder}: cannot be loaded"
        state = self._engine.in_host_memory() | {"buffer": self._buffers()}
        ranks = dist.get_rank(group), dist.get_world_size(group)
        feedback = self.config.error_feedback

        saved_by = run_or_fail_together(group, failed, lambda: saving.check(folder, state, *ranks))
        told = run_or_fail_together(
            group, failed, lambda: saving.of_rank(folder, saved_by, *ranks, feedback)
        )
        # nobody writes to memory before all ranks have found theirs
        run_or_fail_together(group, failed, lambda: self._take(folder, state, told))
        self._engine.take_in()

    def _take(self, folder: Path, state: State, told: State) -> None:
        extra = saving.fill(folder, self._own_share(state)) or self._engine.rank_state()["extra"]
        communication = told.get("communication", {})
        self._engine.load_rank_state({"communication": communication, "extra": extra})
        if "random" in told:
            set_random_state(told["random"], self._engine.device)

    def _buffers(self) -> dict[str, Tensor]:
        """Those that a state dict has."""
        return {name: self._model.get_buffer(name) for name in self._persistent}

    def _own_share(self, state: State) -> State:
        """What this rank reads of what the ranks of its node share, and all that is its own."""
        rank, world_size = self._engine.ranks.rank, self._engine.ranks.world_size
        return {
            kind: {
                name: tensor
                for number, (name, tensor) in enumerate(named.items())
                if kind in ("step", "buffer") or number % world_size == rank
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


def _init_process_group() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(backend)  # as the launcher says
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


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
