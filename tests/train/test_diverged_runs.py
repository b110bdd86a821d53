"""A run that diverges stops, and is a named outcome from its record to the search (attack 5)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.engines.autograd import DDPEngine
from shardlab.models.settings import Model
from shardlab.results.train_result import TrainResult
from shardlab.strategy.document import parse_strategy
from shardlab.train import run as train_module
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run
from shardlab.train.settings import Checkpoint, Train
from tests.measured_run import measure

STEPS = 60
TRAIN: dict[str, Any] = {
    "steps": STEPS,
    "batch_size": 2,
    "sequence_length": 16,
    "untimed_steps": 2,
    "warmup_steps": 2,
    "audit_steps": 1,
    "profiled_steps": 2,
    "learning_rate": 1e15,
}


def plan(data: Path, engine: str = "ddp", **train: Any) -> RunPlan:
    strategy = parse_strategy({"engine": engine, "gradients": {"codec": "int8"}})
    return RunPlan("a-run", 1, strategy, Train(**{**TRAIN, **train}), Model(preset="tiny"), data)


def strict(path: Path) -> Any:
    """Read JSON or JSON lines without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path}: {word}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def measured(data, tmp_path_factory) -> tuple[TrainResult, Path]:
    folder = tmp_path_factory.mktemp("run")
    return measure(plan(data), folder), folder


def test_a_diverged_run_stops_within_a_few_steps_and_says_so(measured):
    record, folder = measured
    assert record.diverged_at is not None
    assert record.diverged_at < record.steps <= record.diverged_at + 3 < STEPS
    assert record.divergence == f"diverged at step {record.diverged_at}"
    assert record.train_loss is None and record.step_ms_mean > 0
    assert record.skipped_steps == record.steps - record.diverged_at
    assert record.not_finite == "validation loss is not finite"
    events = strict(folder / "events.jsonl")
    assert len(events) == record.steps and events[-1]["loss"] is None
    for name in ("metrics.json", "validation.json"):
        text = (folder / name).read_text()
        assert "NaN" not in text and "Infinity" not in text


@pytest.mark.long
def test_a_diverged_run_is_not_continued_from_its_checkpoint(data, tmp_path):
    checkpoint = Checkpoint(every=1, keep=9)
    folders = tmp_path / "first", tmp_path / "second"
    diverging = plan(data, checkpoint=checkpoint)
    root = tmp_path / "checkpoints"
    kept = root.with_name("kept")

    def stop(*arguments: object) -> None:
        if dist.get_rank() == 0:
            root.rename(kept)
        raise UserError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "gather_trained", stop)
        with pytest.raises(UserError, match="stopped"):
            train_run(diverging, folders[0], checkpoints=root)
    train_run(diverging, folders[1], checkpoints=kept)
    train_run(diverging, folders[0])
    first, second = (strict(folder / "events.jsonl") for folder in folders)
    assert [event["loss"] for event in first] == [event["loss"] for event in second]
    metrics = [read_json(folder / "metrics.json") for folder in folders]
    assert metrics[0]["diverged_at"] == metrics[1]["diverged_at"]


def test_replicas_that_part_end_the_run_on_the_way(data, tmp_path, monkeypatch):
    step = DDPEngine.step

    def damaging(self, *arguments):
        outcome = step(self, *arguments)
        if dist.get_rank() == 1:
            with torch.no_grad():
                self.module.module.transformer.h[1].ln_1.bias[7] += 1e-6
        return outcome

    monkeypatch.setattr(DDPEngine, "step", damaging)
    monkeypatch.setattr(train_module, "REPLICA_CHECK_EVERY", 4)
    expected = r"after 4 steps rank 1 holds other values of transformer\.h\.1\.ln_1\.bias than rank"
    with pytest.raises(UserError, match=expected):
        train_run(plan(data, learning_rate=1e-3), tmp_path)
    assert not (tmp_path / "metrics.json").exists()
