"""Trains by Hugging Face's Trainer with the callback, and checks what that does.

torchrun --nproc-per-node 2 trained_by_callback.py FOLDER
"""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from shardlab.core.errors import UserError
from shardlab.hf import CompressionCallback
from tests.comm.wire import is_same_everywhere
from tests.examples.scripts import scalars

FOLDER = Path(sys.argv[1])
DATA = [{"x": torch.randn(64, generator=torch.Generator().manual_seed(i))} for i in range(64)]


class Network(nn.Module):
    """Learns to return what it is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return {"loss": (self.layer(x) - x).square().mean()}


class StopsAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def trainer(name, *callbacks, model=None, **options):
    arguments = TrainingArguments(
        str(FOLDER / name),
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=2,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        **{"save_strategy": "no", **options},
    )
    data = {"train_dataset": DATA, "eval_dataset": DATA}
    return Trainer(model or Network(), arguments, **data, callbacks=[*callbacks])


def parameters(training):
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


# with the loss a tracker gets the totals of rank 0, and a second training goes on with them
training = trainer("compressed", report_to="tensorboard")
callback = CompressionCallback(training, {"codec": "int8", "error_feedback": True})
training.train()
sent = callback.handle.metrics()
if dist.get_rank() == 0:
    shown = scalars(FOLDER / "compressed")
    steps = shown["train/comm/bytes_sent"]
    assert steps.keys() == shown["train/loss"].keys() == {2, 4, 6}
    assert steps[2] < steps[4] < steps[6] == sent["comm/bytes_sent"]
    assert shown["train/comm/residual_norm"][6] > 0
training.train()
assert callback.handle.metrics()["comm/bytes_sent"] > sent["comm/bytes_sent"]

# with sync weights that were loaded since would differ from the outer ones: the line has what to do
still = {"report_to": "none", "learning_rate": 0.0}
training = trainer("first", **still)
callback = CompressionCallback(training, sync={"every": 2, "momentum": 0.5})
training.train()
with torch.no_grad():
    for parameter in training.model.parameters():
        parameter.zero_()
with pytest.raises(UserError, match=r"call handle.detach\(\), and make a new Trainer"):
    training.train()
callback.handle.detach()
training = trainer("second", model=training.model, **still)
CompressionCallback(training, sync={"every": 2, "momentum": 0.5})
training.train()
assert not parameters(training).any()

# what was sent for a step that a loss scaler has left out stays in no residual
training = trainer("skipped", report_to="none")
callback = CompressionCallback(training, {"codec": "int8", "error_feedback": True})
with patch.object(Accelerator, "optimizer_step_was_skipped", True):
    training.train()
assert callback.handle.metrics()["comm/residual_norm"] == 0

# replicas are equal at the end, also where another callback stops them between two rounds
best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 6, "save_steps": 6}
best |= {"save_strategy": "steps"}
for name, stops, options in (
    ("whole", [], {}),
    ("stopped", [StopsAt(5)], {}),
    ("stopped before an evaluation", [StopsAt(5)], best),
):
    training = trainer(name, *stops, report_to="none", **options)
    callback = CompressionCallback(training, sync={"every": 4})
    training.train()
    metrics = callback.handle.metrics()
    assert metrics["sync/step"] == (5 if stops else 6) and metrics["sync/steps_apart"] == 0
    assert is_same_everywhere(parameters(training), dist.group.WORLD)
