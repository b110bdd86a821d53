"""`SlideFSDP`: the `slide` engine for any training script."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.comm.object_collectives import device_of, gather_values, run_or_fail_together
from shardlab.core.device import moved
from shardlab.core.document import validate
from shardlab.core.errors import UserError, warn_script
from shardlab.core.gpus import RankGpu, refuse_shared, usable_gpu
from shardlab.engines import slide_checkpoint as checkpoint
from shardlab.engines.base import EngineState, Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.slide import SlideEngine
from shardlab.engines.slide_groups import gloo_group
from shardlab.engines.slide_memory import FROZEN
from shardlab.engines.slide_model_checks import check_model, loss_of, refuse_state_dicts
from shardlab.engines.state_files import in_host_memory, random_state, set_random_state
from shardlab.models.names import parameter_names
from shardlab.strategy.document import CanonicalStrategy, Strategy, parse_strategy


class SlideFSDP:
    """Training of a model that does not fit the device: layers are streamed from host memory.

    All ranks of the default process group call the same methods in the same order, each with its
    own samples; those of one machine share its memory. If there is no default process group, it
    initialises one, from a launcher's environment or of this rank alone. That group stays: end it
    with `torch.distributed.destroy_process_group` after training, before another is initialised.

    It has not been run on a GPU yet; all tests are on CPUs. There device and host memory are the
    same, and one rank saves nothing; several share parameters and moments.

    Parameters whose `requires_grad` is False stay as they are: host memory holds them once, in
    `param_dtype`, to which they are rounded at the start, without moments or gradients. The choice
    is fixed at the start; another one needs a new `SlideFSDP` of a new model with `state_dict()`.

    Args:
        model: a causal language model, or another with a list of blocks, that returns its loss:
            alone, first of a tuple, or as `loss`. In float32 on the CPU, the same on all ranks.
            It loses its parameters' memory: from now on it trains through this object alone, and
            can be called itself only without gradients.
        strategy: what stands under a name of `strategies` in `params.yaml`, with the same defaults,
            or a `shardlab.Strategy`. `engine` is `slide` and may be left out of a mapping.
            `accumulation` is the number of calls that make up a step (default: 1); each counts
            alike, however many samples it has. `activation_checkpointing` other than `none`
            replaces the model's own.
        learning_rate: of AdamW; `learning_rate` of this object sets that of later steps.
        betas: decay of the first and of the second moment, per step.
        weight_decay: decoupled from the gradient.
        clip: largest global gradient norm. With one, updates overlap with the next forward pass;
            with None they overlap with backward, and a gradient that is not finite is an error.
        seed: of stochastic rounding and stochastic codecs.
        device: that computes; by default the current GPU where the process group has NCCL, else
            the CPU.

    Raises:
        UserError: in one line: a strategy of another engine, a setting that has no meaning, a model
            without blocks or without parameters to train, too little memory.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy | Mapping[str, Any] | None = None,
        *,
        learning_rate: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float | None = 1.0,
        seed: int = 0,
        device: str | torch.device | None = None,
    ) -> None:
        check_model(model)
        parsed = _parse(strategy)
        numbers = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip}
        optimization = validate(Optimization, numbers, "SlideFSDP")
        self.learning_rate = _checked_rate(learning_rate)
        """of the steps that begin from now on"""
        self.gradient_norm: float | None = None
        """of the last step, before clipping"""
        self.applied: bool | None = None
        """whether the last gradient was; one that is not finite is left out, on all ranks"""
        if not dist.is_initialized():
            _init_process_group()
        assert dist.group.WORLD is not None, "initialised"
        self._group = dist.group.WORLD
        # checkpoints may take longer than a rank waits for another in a step
        self._patient = gloo_group(self._group, timedelta(minutes=30))
        self._names = parameter_names(model).values()
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self._persistent = [name for name in model.state_dict() if name in buffers]
        self._model = model
        self._calls_per_step = parsed.accumulation or 1
        parsed = parsed.model_copy(update={"accumulation": self._calls_per_step})
        self._engine = self._build(parsed, optimization, seed, device)
        refuse_state_dicts(model)
        self.ledger = self._engine.ledger
        """traffic between ranks, see `shardlab.attach`"""
        self.module = self._engine.module
        self._calls = 0

    def __call__(self, inputs: Mapping[str, Any] | None = None, /, **batch: Any) -> Any:
        """Run forward and backward; the call that completes a step starts its updates, too.

        Without gradients (`torch.no_grad`) run forward alone.

        Args:
            inputs, batch: inputs of the model by name, on any device, as a mapping or as keywords.

        Returns:
            the output of the model, whose loss is that of these samples.

        Raises:
            UserError: a batch without names, no loss, a learning rate that is none, or a
                `requires_grad` that has changed since the start.
        """
        if not isinstance(inputs, Mapping | None):
            raise UserError("SlideFSDP: give a batch by name: sliding(input_ids=..., labels=...)")
        device = self._engine.device
        batch = {
            name: moved(value, device) if isinstance(value, Tensor) else value
            for name, value in {**(inputs or {}), **batch}.items()
        }
        if not torch.is_grad_enabled():
            return self.module(**batch)
        count = self._calls_per_step
        self._engine.begin(self._calls % count, count, _checked_rate(self.learning_rate))
        output = self._engine.compute(lambda: self._forward_backward(batch))
        self._calls += 1
        if self._calls % count == 0:
            self.gradient_norm, self.applied = self._engine.end()
        return output

    def wait(self) -> None:
        """Wait until all updates are done, on all ranks; raise their errors."""
        self._engine.synchronize()

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the parameters in float32 and of the buffers, by the model's names.

        All of it on rank 0, nothing on the others, as with torch's `StateDictOptions` with
        `full_state_dict` and `cpu_offload`. All ranks call together.
        """
        state = self._engine.in_host_memory()
        if dist.get_rank(self._group) > 0:
            return {}
        parameters = state["parameter"] | state[FROZEN]
        whole = {n: parameters[n].to(torch.float32, copy=True) for n, *_ in self._names}
        tied = {other: whole[names[0]] for names in self._names for other in names[1:]}
        return {**whole, **tied, **in_host_memory(self._buffers())}

    def save(self, folder: str | Path) -> None:
        """Write all that `load` continues from, between steps and atomically.

        Buffers are those of rank 0. Replaces a folder that `save` has written, and no other.

        Raises:
            UserError: something else is there, or a rank cannot write; on all ranks.
        """
        self._between_steps("save")
        engine = self._engine
        state = engine.in_host_memory()  # first: it waits for threads that change rank_state
        state |= {"buffer": in_host_memory(self._buffers())}
        rank_state = engine.rank_state() | {"random": random_state(engine.device)}
        checkpoint.write(Path(folder), state, rank_state, self._patient)

    def load(self, folder: str | Path) -> None:
        """Continue from what `save` wrote, with any number of ranks, which all see the folder.

        With the same number of ranks, torch's random states continue, too. With another, residuals
        of codecs are merged as by `shardlab.merge_states`.

        Raises:
            UserError: there is none, it is damaged, of another model or of one with other frozen
                parameters, or a rank cannot read; on all ranks.
        """
        self._between_steps("load")
        folder, group, engine = Path(folder), self._patient, self._engine
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        state = engine.in_host_memory() | {"buffer": self._buffers()}
        failed = f"{folder}: cannot be loaded"

        def load_rank() -> EngineState:
            rank_state = checkpoint.read_rank(folder, state, rank, world_size)
            engine.load_rank_state({**engine.rank_state(), "communication": {}, **rank_state})
            return rank_state

        rank_state = run_or_fail_together(group, failed, load_rank)
        # last: nobody writes to shared memory before all ranks have found a sound checkpoint
        run_or_fail_together(group, failed, lambda: checkpoint.fill(folder, self._own_share(state)))
        if "random" in rank_state:
            set_random_state(rank_state["random"], engine.device)
        engine.take_in()

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a state dict has."""
        return {name: self._model.get_buffer(name) for name in self._persistent}

    def _own_share(self, state: EngineState) -> EngineState:
        """Return what this rank reads: its part of what a node's ranks share, and all its own."""
        rank, world_size = self._engine.groups.rank, self._engine.groups.world_size
        return {
            kind: {
                name: tensor
                for number, (name, tensor) in enumerate(named.items())
                if kind in ("step", "buffer") or number % world_size == rank
            }
            for kind, named in state.items()
        }

    def _forward_backward(self, batch: dict[str, Any]) -> Any:
        with self._engine.activation_offload, _without_cache(self._model):
            output = self.module(**batch)
        loss = loss_of(output)
        (loss * (self._engine.loss_scale / self._calls_per_step)).backward()
        _end_graph(loss)
        return output

    def _between_steps(self, what: str) -> None:
        if self._calls % self._calls_per_step:
            raise UserError(
                f"SlideFSDP.{what}: in the middle of a step: call it after the last one"
            )

    def _build(
        self,
        strategy: CanonicalStrategy,
        optimization: Optimization,
        seed: int,
        compute_on: str | torch.device | None,
    ) -> SlideEngine:
        overrides = [override.activation_checkpointing for override in strategy.overrides]
        ours = bool({strategy.activation_checkpointing, *overrides} - {None, "none"})
        # a PreTrainedModel, whose class scripts without transformers need not have
        pretrained: Any = self._model
        if ours and getattr(pretrained, "is_activation_checkpointing", False):
            pretrained.activation_checkpointing_disable()  # else layers are computed three times
        device = torch.device(compute_on or device_of(self._group))
        if device.type == "cuda":
            index, gpu = run_or_fail_together(
                self._patient, "GPUs cannot be used", lambda: _own_gpu(device)
            )
            device = torch.device("cuda", index)
            sends = strategy.param_transfer == "shard" or strategy.grad_sync == "gpu_reduce"
            if sends and device_of(self._group).type == "cuda":
                fix = "set param_transfer: full and grad_sync: cpu_reduce"
                refuse_shared(gather_values(gpu, self._patient), f"{fix}, which use host memory")
        engine = build_engine(self._model, strategy, optimization, self._group, seed, device=device)
        assert isinstance(engine, SlideEngine)
        return engine


def _parse(strategy: Strategy | Mapping[str, Any] | None) -> CanonicalStrategy:
    """Return the canonical form of a strategy of engine `slide`.

    Raises:
        UserError: it is of another engine, or a setting has no meaning.
    """
    if strategy is None or isinstance(strategy, Mapping):
        strategy = {"engine": "slide", **(strategy or {})}
    parsed = parse_strategy(strategy, "SlideFSDP").canonical()
    if parsed.engine != "slide":
        instead = parsed.traits.in_scripts
        other = f", or use {instead} and shardlab.attach" if instead else ""
        raise UserError(
            f"SlideFSDP: the strategy's engine is {parsed.engine}, and SlideFSDP is slide: remove "
            f"engine and the settings that slide lacks{other}"
        )
    lost = parsed.gradients.left_out()
    if lost is not None:
        warn_script(f"SlideFSDP: {lost}")
    return parsed


def _checked_rate(rate: Any) -> float:
    """Return a number of its own: a scheduler may change a tensor while updates run."""
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserError(f"SlideFSDP.learning_rate is {rate!r}: it must be 0 or more, and finite")
    return number


def _init_process_group() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(backend)  # as the launcher says
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _own_gpu(device: torch.device) -> tuple[int, RankGpu]:
    """Make the GPU of this rank the current one: that of the device's index.

    By default that of LOCAL_RANK, unless the program has made another one current.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    if device.index is None and index == 0:
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
    return index, usable_gpu(index)


def _end_graph(loss: Tensor) -> None:
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
def _without_cache(model: nn.Module) -> Iterator[None]:
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
