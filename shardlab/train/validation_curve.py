"""Validation loss between the steps of a run.

Rank 0 copies the parameters of any engine into a plain model, so that a loss depends on them alone:
with all sequences, that of the last step is the loss of the saved model.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from shardlab.comm.object_collectives import device_of
from shardlab.data.tokens import FirstTokens, Tokens, TokenSplit, open_split
from shardlab.engines.base import Engine
from shardlab.models.build import build_model
from shardlab.train.evaluation import BATCH, evaluate
from shardlab.train.plans import RunPlan

_LONGEST = timedelta(hours=1)
"""wait of the other ranks for an evaluation"""


class Validator:
    """Evaluator of the model that an engine trains, between steps; all ranks call together.

    Args:
        plan: of the run, with `train.validation`.
        group: of the ranks that train.
        before: called on every rank before it takes memory for the first evaluation.

    Raises:
        UserError: a shard of the split is missing or damaged.
    """

    def __init__(
        self, plan: RunPlan, engine: Engine, group: dist.ProcessGroup, before: Callable[[], None]
    ) -> None:
        assert plan.train.validation is not None, "nobody asks for a curve"
        self._plan, self._engine, self._before = plan, engine, before
        self._options = plan.train.validation
        self._device = device_of(group)
        # a separate group: evaluation may take longer than a rank may wait in a step
        self._group = dist.new_group(dist.get_process_group_ranks(group), timeout=_LONGEST)
        self._split: TokenSplit | None = None
        if dist.get_rank(group) == 0:
            self._split = open_split(plan.data / "tokens", "validation")
        self._model: nn.Module | None = None

    def loss_after(self, steps: int) -> float | None:
        """Return the loss in nats per token after so many steps, on rank 0; None on other ranks,
        and where no evaluation is due.

        Copies of the model that train alone give that of the parameters that they agree on.
        """
        if steps % self._options.every:
            return None
        self._before()
        if self._split is not None and self._model is None:
            self._model = self._build(self._split)
        # the ranks gather once rank 0 has its model: a wait of theirs is as short as in a step
        dist.barrier(self._group)
        loss = None
        if self._split is not None and self._model is not None:
            loss = self._evaluate(self._model, self._split)
        else:
            for _ in self._engine.whole_parameters():
                pass
        dist.barrier(self._group)
        return loss

    def _build(self, split: TokenSplit) -> nn.Module:
        plan = self._plan
        built = build_model(
            *(plan.model, split.vocabulary, plan.train.sequence_length, split.end_of_text),
            seed=plan.seed,
        )
        model: nn.Module = built.whole()
        return model.to(self._device)

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, split: TokenSplit) -> float:
        length = self._plan.train.sequence_length
        parameters = dict(model.named_parameters())
        for part in self._engine.whole_parameters():
            for name, tensor in part.items():
                parameters[name].copy_(tensor)
        text: Tokens = split
        if self._options.sequences is not None:
            text = FirstTokens(split, self._options.sequences * length + 1)
        return evaluate(model, text, length, BATCH).loss
