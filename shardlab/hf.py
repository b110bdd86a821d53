"""Compressed or rare communication of a Hugging Face Trainer, by a callback."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from shardlab.comm.attach import attach
from shardlab.comm.handle import Handle
from shardlab.core.errors import UserError


class CompressionCallback(TrainerCallback):
    """Attaches to the model that a Trainer has wrapped, and adds `handle.metrics()` to its logs.

        callback = shardlab.hf.CompressionCallback(trainer, gradients="int8")
        trainer.train()
        print(callback.handle)

    Every tracker of `report_to` gets the metrics of rank 0 with the training loss. With `sync` the
    callback counts the steps, and averages the replicas after the last one. A further
    call of `trainer.train` goes on with the handle, but not with `sync`. Trainer's checkpoints hold
    nothing of it: a script that resumes begins with a new one.

    Args:
        trainer: the callback adds itself to it, before the trackers.
        gradients: as in `shardlab.attach`.
        weights: likewise.
        sync: likewise.
        options: further ones of `shardlab.attach`, such as `seed`.
    """

    handle: Handle
    """of the wrapped model, from the beginning of the training on"""

    def __init__(
        self,
        trainer: Trainer,
        gradients: Any = "none",
        weights: Any = "none",
        sync: Any = None,
        **options: Any,
    ) -> None:
        self._trainer = trainer
        self._attached_to: nn.Module | None = None
        self._options: Mapping[str, Any] = {
            "gradients": gradients,
            "weights": weights,
            "sync": sync,
            **options,
        }
        # a tracker logs what it is given, so it comes after what adds to that
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Attach to the wrapped model, which callbacks are not given.

        Raises:
            UserError: Trainer has one process, which sends nothing; the replicas of `sync` have
                been trained already; or as `attach`.
        """
        if not dist.is_initialized():
            raise UserError(
                "CompressionCallback: Trainer runs in one process: start the script by torchrun "
                "--nproc-per-node 2"
            )
        model = self._trainer.model_wrapped
        if self._attached_to is not model:
            self.handle = attach(model, **self._options)
            self._attached_to = model
        elif self._options["sync"] is not None:  # else the wrapper of an earlier call serves again
            raise UserError(
                "CompressionCallback: a second train() with sync may begin with other weights, of "
                "which the outer optimizer knows nothing: call handle.detach(), and make a new "
                "Trainer and callback"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End a step; after the last one average the replicas, before they are evaluated.

        `on_train_end` would be too late: the best model has been loaded then.
        """
        if self._trainer.accelerator.optimizer_step_was_skipped:
            self.handle.rollback()
        self.handle.step()
        if state.global_step == state.max_steps:
            self.handle.synchronize()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the metrics to the logs of a training loss."""
        if logs is not None and "loss" in logs and state.is_world_process_zero:
            logs |= self.handle.metrics()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average replicas that another callback has stopped early."""
        is_apart = self.handle.metrics().get("sync/steps_apart", 0) > 0
        has_loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if is_apart and not has_loaded:
            self.handle.synchronize()
