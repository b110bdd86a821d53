"""Killed runs resume from their checkpoints with the same results."""

import dataclasses
import random
import shutil
from pathlib import Path

import pytest

from shardlab.config.schema import Checkpoint
from shardlab.core.errors import StorageError, UserError
from shardlab.core.files import read_json, read_json_lines
from shardlab.train.run import train_run
from tests.train.checkpointed import INT4, plan_of, strategy_of
from tests.train.interrupted_runs import Outcome, interrupt, run_straight

FORMATS = {
    "ddp": {"format": "sharded", "asynchronous": True},
    "fsdp1": {"format": "sharded"},
    "fsdp2": {"format": "full"},
    "manual": {"format": "sharded"},
    "slide": {"format": "sharded", "asynchronous": True},
}


@pytest.mark.parametrize(
    ("engine", "kills"),
    [
        ("ddp", (True,)),
        pytest.param("fsdp1", (True,), marks=pytest.mark.long),
        pytest.param("fsdp2", (True,), marks=pytest.mark.long),
        pytest.param("manual", (False,), marks=pytest.mark.long),
        pytest.param("slide", (False, True), marks=pytest.mark.long),
    ],
)
def test_killed_run_resumes_bit_for_bit(data, tmp_path, engine, kills):
    """With kills at any time, and while a checkpoint is being written."""
    plan = plan_of(data, strategy_of(engine, **INT4), steps=12, audit_steps=0, profiled_steps=1)
    straight = run_straight(plan, tmp_path / "straight")
    for in_a_save in kills:
        work = tmp_path / f"in-a-save-{in_a_save}"
        row = interrupt(plan, FORMATS[engine], straight, work, random.Random(0), in_a_save)
        assert row.losses_equal and row.weights_equal and not row.left, row
        assert row.resumed_after > 0 or row.killed_in <= 4, row


def with_train(plan, **values):
    return dataclasses.replace(plan, train=plan.train.model_copy(update=values))


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """A run whose outputs could not be written, after all of its steps."""
    plan = plan_of(data, strategy_of("fsdp2", **INT4), steps=6, untimed_steps=2)
    plan = with_train(plan, checkpoint=Checkpoint(every=4))
    folder, root = (tmp_path_factory.mktemp(name) for name in ("stopped", "checkpoints"))
    (folder / "final_model").touch()
    with pytest.raises(StorageError, match=r"final_model: cannot be written \(Not a directory"):
        train_run(plan, folder, checkpoints=root)
    assert [path.name for path in root.iterdir()] == ["step-00000004"]
    (folder / "final_model").unlink()
    return plan, folder, root


@pytest.mark.long
def test_resumed_run_reports_all_steps(stopped, tmp_path):
    plan, *given = stopped
    folder, root = (shutil.copytree(each, tmp_path / each.name) for each in given)
    train_run(with_train(plan, checkpoint=None), tmp_path / "straight")
    train_run(plan, folder, telemetry=tmp_path / "scalars", checkpoints=root)
    assert Outcome.read(folder) == Outcome.read(tmp_path / "straight")
    assert [e["step"] for e in read_json_lines(folder / "events.jsonl")] == list(range(6))
    found, expected = (read_json(f / "metrics.json") for f in (folder, tmp_path / "straight"))
    for key in ("bytes_raw", "density", "residual_norm", "grad_rel_error", "clipped_steps"):
        assert found[key] == pytest.approx(expected[key], rel=1e-12), key
    assert found["params_hash"] == expected["params_hash"]
    # in their first step the ranks of a process compare what they are about to do
    assert found["extra_collectives"] > expected["extra_collectives"]
    assert scalar_steps(tmp_path / "scalars") == list(range(6))
    assert not root.exists()


def scalar_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = EventAccumulator(str(folder)).Reload()
    return [event.step for event in scalars.Scalars("train/loss")]


def test_a_run_with_other_values_is_refused_in_one_line(stopped):
    plan, folder, root = stopped
    with pytest.raises(UserError, match=r"^[^\n]*train\.clip 1\.0, now it is 0\.5[^\n]*$"):
        train_run(with_train(plan, clip=0.5), folder, checkpoints=root)
