"""Trains by Hugging Face's Trainer with the callback, and checks what that does.

torchrun --nproc-per-node 2 trained_by_callback.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from shardlab.hf import CompressionCallback
from tests.comm.wire import is_same_everywhere

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


def trainer(name, *callbacks, **options):
    arguments = TrainingArguments(
        str(FOLDER / name),
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=2,
        save_strategy="no",
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        **options,
    )
    return Trainer(Network(), arguments, train_dataset=DATA, callbacks=[*callbacks])


def logged(name):
    """What TensorBoard shows, by its tag: the values by their step."""
    (path,) = (FOLDER / name).rglob("events.out.tfevents.*")
    events = EventAccumulator(str(path)).Reload()
    tags = events.Tags()["scalars"]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


def parameters(training):
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


# with the loss a tracker gets the totals of rank 0, and a second training goes on with them
training = trainer("compressed", report_to="tensorboard")
callback = CompressionCallback(training, {"codec": "int8", "error_feedback": True})
training.train()
sent = callback.handle.metrics()
if dist.get_rank() == 0:
    shown = logged("compressed")
    steps = shown["train/comm/bytes_sent"]
    assert steps.keys() == shown["train/loss"].keys() == {2, 4, 6}
    assert steps[2] < steps[4] < steps[6] == sent["comm/bytes_sent"]
    assert shown["train/comm/residual_norm"][6] > 0
training.train()
assert callback.handle.metrics()["comm/bytes_sent"] > sent["comm/bytes_sent"]

# replicas are equal at the end, also where another callback stops them between two rounds
for name, stops in (("whole", []), ("stopped", [StopsAt(5)])):
    training = trainer(name, *stops, report_to="none")
    callback = CompressionCallback(training, sync={"every": 4})
    training.train()
    metrics = callback.handle.metrics()
    assert metrics["sync/step"] == (5 if stops else 6) and metrics["sync/steps_apart"] == 0
    assert is_same_everywhere(parameters(training), dist.group.WORLD)
