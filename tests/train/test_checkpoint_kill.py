"""Killed runs resume from their checkpoints with the same results."""

import dataclasses
import random

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardlab.core.errors import StorageError, UserError
from shardlab.core.files import read_json, read_json_lines
from shardlab.train.checkpoint_folder import Folder, damage_in
from shardlab.train.run import train_run
from shardlab.train.settings import Checkpoint
from tests.train.checkpointed import INT4, plan_of, strategy_of
from tests.train.interrupted_runs import Outcome, kill_a_rank

RARE = {"engine": "ddp", "sync": {"every": 3, "delay": 1, **INT4}}


def with_train(plan, **values):
    return dataclasses.replace(plan, train=plan.train.model_copy(update=values))


@pytest.mark.parametrize(
    ("engine", "checkpoint", "in_a_save"),
    [
        ("ddp", {"format": "sharded", "asynchronous": True}, True),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("fsdp1", {"format": "sharded"}, True),
                ("fsdp2", {"format": "full"}, True),
                ("manual", {"format": "sharded"}, False),
                ("slide", {"format": "sharded", "asynchronous": True}, True),
                ("rare", {"format": "full"}, False),
            )
        ),
    ],
)
def test_killed_run_resumes_bit_for_bit(data, tmp_path, engine, checkpoint, in_a_save):
    """With kills at any time, and while a checkpoint is being written."""
    strategy = RARE if engine == "rare" else strategy_of(engine, **INT4)
    plan = plan_of(data, strategy, steps=8, audit_steps=0, profiled_steps=1)
    train_run(plan, tmp_path / "straight")
    plan = with_train(plan, checkpoint=Checkpoint(every=2, **checkpoint))
    target, root, chance = tmp_path / "run", tmp_path / "checkpoints", random.Random(engine)
    pause_s = chance.uniform(0, 0.02)
    killed_in = kill_a_rank(
        *(plan, target, root, chance.randrange(2, 5)),
        lambda: not in_a_save or any(root.glob(".step-*.partial")),
        pause_s,
    )
    folder = Folder(root)
    assert folder.steps() or killed_in < 4
    assert all(damage_in(folder.path(step)) is None for step in folder.steps())
    train_run(plan, target, checkpoints=root)
    assert Outcome.read(target) == Outcome.read(tmp_path / "straight")
    assert not root.exists() and not list(target.rglob(".*"))


@pytest.mark.long
def test_resumed_run_reports_all_steps(data, tmp_path):
    """After one whose outputs could not be written, and which is refused with other values."""
    plan = plan_of(data, strategy_of("fsdp2", **INT4), steps=6, untimed_steps=2)
    train_run(plan, tmp_path / "straight")
    plan = with_train(plan, checkpoint=Checkpoint(every=4))
    folder, root = tmp_path / "run", tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "final_model").touch()
    with pytest.raises(StorageError, match=r"final_model: cannot be written \(Not a directory"):
        train_run(plan, folder, checkpoints=root)
    assert [path.name for path in root.iterdir()] == ["step-00000004"]
    (folder / "final_model").unlink()
    with pytest.raises(UserError, match=r"^[^\n]*train\.clip 1\.0, now it is 0\.5[^\n]*$"):
        train_run(with_train(plan, clip=0.5), folder, checkpoints=root)
    train_run(plan, folder, telemetry=tmp_path / "scalars", checkpoints=root)
    assert Outcome.read(folder) == Outcome.read(tmp_path / "straight")
    assert [e["step"] for e in read_json_lines(folder / "events.jsonl")] == list(range(6))
    found, expected = (read_json(f / "metrics.json") for f in (folder, tmp_path / "straight"))
    for key in ("bytes_raw", "density", "residual_norm", "grad_rel_error", "clipped_steps"):
        assert found[key] == pytest.approx(expected[key], rel=1e-12), key
    assert found["params_hash"] == expected["params_hash"]
    scalars = EventAccumulator(str(tmp_path / "scalars")).Reload().Scalars("train/loss")
    assert [event.step for event in scalars] == list(range(6))
    assert not root.exists()
