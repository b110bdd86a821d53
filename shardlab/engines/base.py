"""The contract of an engine, and the arguments that every engine is built with."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from shardlab.comm.attach import attach
from shardlab.comm.ledger import Audit
from shardlab.core.device import moved
from shardlab.core.document import Document
from shardlab.core.types import Betas, OptimizerName
from shardlab.engines.numerics import LossScale
from shardlab.engines.sliding_checkpoint import activation_offload
from shardlab.models.units import uses_fp16
from shardlab.profiling.labels import BACKWARD, FORWARD
from shardlab.strategy.document import CanonicalStrategy

EngineState = dict[str, dict[str, Tensor]]
"""tensors by what they are, then by name"""
Fill = Callable[[nn.Module], None]
"""loads the weights of a module's parameters, on the device that computes"""


_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Optimization(Document):
    """AdamW (Loshchilov and Hutter 2019) with clipped gradients, by default as language models are
    commonly trained; or with Muon (Jordan et al. 2024) for the matrices of the blocks."""

    optimizer: OptimizerName = "adamw"
    weight_decay: _NonNegative = 0.1
    clip: float | None = Field(1.0, gt=0)
    """largest global gradient norm, or None"""
    betas: Betas = (0.9, 0.95)
    eps: _NonNegative = 1e-8


@dataclass(frozen=True)
class EngineSetup:
    """Strategy, optimization, ranks and device of an engine."""

    strategy: CanonicalStrategy
    """its `accumulation` is the number of micro-batches of a step, None where that is unknown"""
    optimization: Optimization
    group: dist.ProcessGroup
    """all ranks that train the model"""
    seed: int
    """of codecs that draw random numbers"""
    device: torch.device
    """that computes"""
    fill: Fill


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one step on this rank."""

    loss: float
    """nats per token, mean over this rank's micro-batches"""
    gradient_norm: float
    """before clipping; the same on all ranks"""
    applied: bool
    """False when the gradient was not finite and the step was left out, on all ranks alike"""


class Engine(ABC):
    """Trainer of one model on the ranks of one process group by one strategy.

    Laws:
    - all ranks call the same methods in the same order;
    - from one seed all engines give the same losses, up to the rounding of sums;
    - gradients are reduced once per step, after the last micro-batch, unless `slide` reduces them
      on the device;
    - what moved between ranks is in `ledger`;
    - a step ends by `Handle.step`, after `Handle.rollback` where it is left out: error feedback
      then counts what it has sent in it as lost.

    Args:
        module: runs forward and backward by autograd; its parameters are on the device while they
            compute.
        attached: more for `shardlab.comm.attach.attach`.
    """

    def __init__(self, module: nn.Module, setup: EngineSetup, **attached: Any) -> None:
        strategy, device = setup.strategy, setup.device
        self.module = module
        self.device = device
        """that computes"""
        with warnings.catch_warnings():
            # an experiment knows its steps, and says before they run what they never send
            warnings.filterwarnings("ignore", "attach: .* drops what it does not send")
            self._handle = attach(
                module,
                strategy.gradients,
                strategy.weights,
                strategy.sync,
                seed=setup.seed,
                **attached,
            )
        self.ledger = self._handle.ledger
        self._optimization = setup.optimization
        self._loss_scale = LossScale(uses_fp16(strategy, device))
        self.activation_offload = activation_offload(strategy, device)
        """around forward: where activations go"""

    def _accumulate(self, batch: Tensor, count: int, seed: int | None = None) -> Tensor:
        """Run forward and backward of one of `count` micro-batches; return its loss, [] on the
        device, which the host would wait for."""
        if seed is not None:
            torch.manual_seed(seed)
        batch = moved(batch, self.device)
        with record_function(FORWARD):
            with self.activation_offload:
                logits = self._logits(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        with record_function(BACKWARD):
            factor = self._loss_scale.value / count
            (loss if factor == 1 else loss * factor).backward()
        return loss.detach()

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.module(input_ids=tokens).logits
        return logits

    @abstractmethod
    def step(
        self,
        micro_batches: Sequence[Tensor],
        learning_rate: float,
        seeds: Sequence[int | None] | None = None,
    ) -> StepOutcome:
        """Run forward, backward and update.

        Args:
            micro_batches: int64 tokens [batch, sequence + 1] each; position t predicts t + 1.
            seeds: of torch's generators for dropout, one per micro-batch; None: generators go on.
        """

    @abstractmethod
    def whole_parameters(self) -> Iterator[dict[str, Tensor]]:
        """Iterate over the model between steps, some parameters at a time, whole on every rank.

        Where copies of the model train alone these are the parameters that they agree on. All
        ranks take all of them. What was yielded may be gone when the next ones come.

        Returns:
            by the names of the unwrapped module, the first name for a tied parameter.
        """

    @abstractmethod
    def shards(self) -> EngineState:
        """Return parameters and the optimizer's state, in the memory that training works on.

        What is sharded is a DTensor, the rest is the same on all ranks. Writing to these tensors
        on all ranks, before the first step, is how an engine continues from saved ones.

        Returns:
            `parameter` and, with the same names, `exp_avg`, `exp_avg_sq` and `step` of AdamW, or
            `momentum_buffer` of Muon.
        """

    def agreed_shards(self) -> EngineState:
        """Return what a checkpoint has of `shards()` for any number of ranks: where copies of the
        model train alone, the parameters that they agree on, and moments of zero."""
        return self.shards()

    def replicas(self) -> dict[str, Tensor]:
        """Return trained parameters that another rank may hold, too, as this rank holds them.

        What is sharded is a DTensor. To be read between steps, and to be forgotten.
        """
        return {}

    def held_elements(self) -> int:
        """Return the elements of parameters that this rank keeps between steps, with padding."""
        parameters = self.module.parameters()
        held = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
        return sum(part.numel() for part in held)

    def split(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """Return the parts of the whole tensor of an entry of `shards()`, by the model's own names.

        Returns:
            views of `whole`, the first name for a tied parameter.
        """
        return {name: whole}

    def gather(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return an entry of `shards()` whole on every rank, by the names of `split`."""
        return self.split(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    def rehearse(self, batch: Tensor) -> None:  # noqa: B027  (most engines need none)
        """Do what only the first step of a process does; called before saved tensors are loaded.

        Args:
            batch: as `step` takes them.
        """

    def rank_state(self) -> EngineState:
        """Return state outside of shards: `communication` of this rank alone, `extra` of all alike.

        None of the tensors is written to later.
        """
        return {"communication": self._handle.state_dict(), "extra": self._loss_scale.state_dict()}

    def load_rank_state(self, state: EngineState) -> None:
        """Continue from `rank_state()` of the same rank and strategy."""
        self._handle.load_state_dict(state["communication"])
        self._loss_scale.load_state_dict(state["extra"])

    def synchronize(self) -> None:
        """Make the parameters of all ranks those that all agree on; called after the last step."""
        self._handle.synchronize()

    def wait(self) -> None:
        """Wait until nothing of earlier steps is under way any more, messages or updates."""
        self._handle.wait()

    def residual_norm(self) -> float | None:
        """Return the norm of what error feedback holds back on this rank; None without it."""
        feedback = self._handle.feedback
        return None if feedback is None else feedback.norm()

    def residual_squares(self) -> Tensor | None:
        """Return the square of that norm: float64 [] on the device, which nothing waits for."""
        feedback = self._handle.feedback
        return None if feedback is None else feedback.sum_of_squares()

    def audit(self) -> AbstractContextManager[Audit]:
        """Return a context in which every reduction is also done exactly and compared."""
        return self.ledger.auditing()
