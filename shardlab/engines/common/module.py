"""What all engines have in common that let a module compute by autograd."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from shardlab.activations.checkpoint import activation_offload
from shardlab.comm.attach import attach
from shardlab.comm.handle import Handle
from shardlab.comm.ledger import Audit
from shardlab.engines.common.base import Engine, State
from shardlab.engines.common.precision import LossScale, uses_fp16
from shardlab.engines.common.setup import EngineSetup
from shardlab.profiling.traces.labels import BACKWARD, FORWARD
from shardlab.strategy.compression import WeightCompression
from shardlab.strategy.strategy import CanonicalStrategy


class ModuleEngine(Engine):
    """Engines whose wrapped module runs forward and backward by plain autograd.

    Args:
        module: whose parameters are on the device while they compute.
        attached: more for `shardlab.comm.attach.attach`.
    """

    def __init__(self, module: nn.Module, setup: EngineSetup, **attached: Any) -> None:
        strategy, device = setup.strategy, setup.device
        self.module = module
        self.device = device
        """that computes"""
        self._handle = _attach(module, strategy, setup.seed, **attached)
        self.ledger = self._handle.ledger
        self._optimization = setup.optimization
        self._loss_scale = LossScale(uses_fp16(strategy, device))
        self.activation_offload = activation_offload(strategy, device)
        """around forward: where the inputs of checkpointed blocks go"""

    def _accumulate(self, batch: Tensor, count: int) -> float:
        """Forward and backward of one of `count` micro-batches; returns its loss."""
        batch = batch.to(self.device)
        with record_function(FORWARD), self.activation_offload:
            logits = self._logits(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        with record_function(BACKWARD):
            (loss * (self._loss_scale.value / count)).backward()
        return float(loss.detach())

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.module(input_ids=tokens).logits
        return logits

    def rank_state(self) -> State:  # noqa: D102
        return {"communication": self._handle.state_dict(), "extra": self._loss_scale.state_dict()}

    def load_rank_state(self, state: State) -> None:  # noqa: D102
        self._handle.load_state_dict(state["communication"])
        self._loss_scale.load_state_dict(state["extra"])

    def residual_norm(self) -> float | None:  # noqa: D102
        feedback = self._handle.feedback
        return None if feedback is None else feedback.norm()

    @contextmanager
    def audit(self) -> Iterator[Audit]:  # noqa: D102
        with self.ledger.auditing() as audit:
            yield audit


def _attach(module: nn.Module, strategy: CanonicalStrategy, seed: int, **more: Any) -> Handle:
    given, weights = strategy.gradients, strategy.weights or WeightCompression()
    return attach(
        module,
        given.codec,
        weights.codec,
        error_feedback=given.error_feedback,
        residual=given.residual,
        route=given.route,
        minimum_size=given.minimum_size,
        exclude=given.exclude,
        warmup_steps=given.warmup_steps,
        between_nodes=given.between_nodes,
        ranks_per_node=given.ranks_per_node,
        weights_minimum_size=weights.minimum_size,
        seed=seed,
        **more,
    )
