"""Engines whose parameters optimizers of torch update, and `ddp` of them."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardlab.engines.base import Engine, EngineSetup, EngineState, Optimization, StepOutcome
from shardlab.engines.numerics import (
    clip_coefficient,
    local_parts,
    norm_of,
    read_together,
    sum_of_squares,
)
from shardlab.models.names import plain
from shardlab.models.parts import hidden_matrices
from shardlab.models.units import dtype_of


class AutogradEngine(Engine):
    """Base of engines that update parameters when all gradients of a step are there."""

    _shards: dist.ProcessGroup | None = None
    """ranks that hold different parts of one gradient, if there are any"""

    def __init__(self, module: nn.Module, setup: EngineSetup, **attached: Any) -> None:
        super().__init__(module, setup, **attached)
        self._is_rare = setup.strategy.sync is not None
        self._optimizers = _optimizers(module, setup.optimization)
        self._optimizer_of = {
            parameter: optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    @abstractmethod
    def _accumulating(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes are not the last ones of their step."""

    def step(  # noqa: D102
        self,
        micro_batches: Sequence[Tensor],
        learning_rate: float,
        seeds: Sequence[int | None] | None = None,
    ) -> StepOutcome:
        count = len(micro_batches)
        *early, last = zip(micro_batches, seeds or [None] * count, strict=True)
        losses = []
        if early:
            with self._accumulating():
                losses += [self._accumulate(batch, count, seed) for batch, seed in early]
        losses.append(self._accumulate(last[0], count, last[1]))
        self._after_backward()
        gradients = self._gradients()
        squares, *read = read_together(self._squares(gradients), *losses)
        norm = norm_of(squares)
        self._clip(gradients, norm)
        applied = math.isfinite(norm)
        if applied:
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
        else:
            self._handle.rollback()
        self._handle.step()
        self._clear()
        self._loss_scale.update(applied)
        return StepOutcome(sum(read) / len(read), norm, applied)

    def _clear(self) -> None:
        """Forget the gradients of a step."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def _after_backward(self) -> None:
        """Wait for reductions that overlap with backward, where backward itself does not."""

    def _gradients(self) -> list[Tensor]:
        """Return this rank's gradients, divided by the loss scale."""
        parameters = self.module.parameters()
        gradients = local_parts(p.grad for p in parameters if p.grad is not None)
        if self._loss_scale.value != 1:
            torch._foreach_mul_(gradients, 1 / self._loss_scale.value)
        return gradients

    def _squares(self, gradients: list[Tensor]) -> Tensor:
        """Return the sum of squares of the whole gradient, float64 [] on the device."""
        squares = sum_of_squares(gradients)
        if self._shards is not None:
            dist.all_reduce(squares, group=self._shards)
        return squares

    def _clip(self, gradients: list[Tensor], norm: float) -> None:
        coefficient = clip_coefficient(norm, self._optimization.clip)
        if coefficient != 1:
            torch._foreach_mul_(gradients, coefficient)

    def whole_parameters(self) -> Iterator[dict[str, Tensor]]:  # noqa: D102
        for name, tensor in self.replicas().items():
            yield self.gather(name, tensor)

    def shards(self) -> EngineState:  # noqa: D102
        kinds: EngineState = {}
        for name, parameter in self._trained().items():
            assert parameter in self._optimizer_of, (
                f"{name} is not what the optimizer updates: it is gathered"
            )
            tensors = {"parameter": parameter.detach(), **self._moments(parameter)}
            for kind, tensor in tensors.items():
                kinds.setdefault(kind, {})[name] = self._laid_out(name, tensor)
        return kinds

    def agreed_shards(self) -> EngineState:  # noqa: D102
        shards = self.shards()
        if not self._is_rare:
            return shards
        zeros = {
            kind: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            for kind, tensors in shards.items()
        }
        return {**zeros, "parameter": self.replicas()}

    def rank_state(self) -> EngineState:
        """Return also `copy`: the parameters and moments of a copy that trains alone."""
        state = super().rank_state()
        if self._is_rare:
            state["copy"] = {key: local.clone() for key, local in self._replica_tensors().items()}
        return state

    def load_rank_state(self, state: EngineState) -> None:  # noqa: D102
        super().load_rank_state(state)
        saved = state.get("copy")
        if saved is not None:  # of the same ranks; others begin with what all copies agree on
            for key, local in self._replica_tensors().items():
                local.copy_(saved[key])

    def _replica_tensors(self) -> dict[str, Tensor]:
        return {
            f"{kind}/{name}": tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for kind, tensors in self.shards().items()
            for name, tensor in tensors.items()
        }

    def replicas(self) -> dict[str, Tensor]:  # noqa: D102
        exchanged = self._handle.exchanged_parameters()
        return {
            name: self._laid_out(name, exchanged.get(parameter, parameter.detach()))
            for name, parameter in self._trained().items()
        }

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer updates, by name."""
        return {plain(name): parameter for name, parameter in self.module.named_parameters()}

    def _laid_out(self, name: str, local: Tensor) -> Tensor:
        """Return a tensor of `_trained()[name]` in the layout of `shards`."""
        return local

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of the optimizer; zeros, as torch begins with, before the first step."""
        optimizer = self._optimizer_of[parameter]
        state = optimizer.state[parameter]
        if not state and isinstance(optimizer, torch.optim.Muon):
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        elif not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        return cast(dict[str, Tensor], state)


def _optimizers(module: nn.Module, options: Optimization) -> list[torch.optim.Optimizer]:
    """Return AdamW of all parameters, or Muon of the matrices of the blocks and AdamW of the
    others."""
    matrices = hidden_matrices(module) if options.optimizer == "muon" else []
    by_muon = {*matrices}
    adamw = torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter not in by_muon],
        lr=0.0,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    if not matrices:
        return [adamw]
    # updates as large as those of AdamW: one learning rate serves both
    decay, scale = options.weight_decay, "match_rms_adamw"
    return [torch.optim.Muon(matrices, lr=0.0, weight_decay=decay, adjust_lr_fn=scale), adamw]


class DDPEngine(AutogradEngine):
    """Engine with the whole model on every rank; buckets of gradients are averaged in backward."""

    def __init__(self, model: nn.Module, setup: EngineSetup) -> None:
        setup.fill(model)
        wrapped = DistributedDataParallel(
            model,
            process_group=setup.group,
            bucket_cap_mb=setup.strategy.bucket_mb,
            gradient_as_bucket_view=True,
        )
        super().__init__(wrapped, setup)
        self._wrapped = wrapped
        self._dtype = dtype_of(setup.strategy.param_dtype, setup.device)

    def _accumulating(self) -> AbstractContextManager[None]:
        return self._wrapped.no_sync()

    def _logits(self, tokens: Tensor) -> Tensor:
        narrow = self._dtype is not torch.float32
        with torch.autocast(self.device.type, self._dtype, enabled=narrow):
            return super()._logits(tokens)

    def _trained(self) -> dict[str, nn.Parameter]:
        named = self._wrapped.module.named_parameters()
        return {plain(name): parameter for name, parameter in named}

    def rehearse(self, batch: Tensor) -> None:
        """Run a pass: DDP rebuilds its buckets after the first, and sums depend on the layout."""
        before = self._handle.state_dict()
        self._accumulate(batch, 1)
        self._after_backward()
        self._clear()
        self._handle.load_state_dict(before)
