"""Checkpoints that outlast their run, and runs that begin from one that the user names."""

import dataclasses
import json
import shutil

import pytest

from shardlab.core.errors import UserError
from shardlab.core.files import read_json, read_json_lines
from shardlab.models.settings import Model
from shardlab.train.checkpoint_folder import Folder, damage_in
from shardlab.train.run import train_run
from shardlab.train.settings import Checkpoint
from tests.commands import typed
from tests.train.checkpointed import INT4, plan_of, strategy_of
from tests.train.interrupted_runs import Outcome

SHORT = {"decay": "constant", "audit_steps": 0, "profiled_steps": 1}


def plan_for(data, steps, engine="fsdp2", **train):
    return plan_of(data, strategy_of(engine, **INT4), steps=steps, **{**SHORT, **train})


def saving(every, **options):
    return Checkpoint(every=every, **options)


@pytest.fixture(scope="module")
def kept(data, tmp_path_factory):
    """A folder with the checkpoints of the steps 2 and 3 of a run of 3 steps that has ended."""
    folder = tmp_path_factory.mktemp("ended")
    plan = plan_for(data, 3, checkpoint=saving(1))
    root = folder / "kept/running"
    train_run(plan, folder / "run", checkpoints=root, kept=folder / "kept")
    return folder / "kept"


def refusal(plan, named, tmp_path):
    with pytest.raises(UserError) as caught:
        train_run(plan, tmp_path / "run", checkpoints=tmp_path / "root", resume=named)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_checkpoints_of_a_run_that_has_ended_are_kept(kept):
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000002", "step-00000003"]
    assert all(damage_in(path) is None for path in kept.iterdir())


@pytest.mark.parametrize("step", [2, 3])
def test_a_run_from_a_named_checkpoint_is_the_run_without_a_break(data, kept, tmp_path, step):
    straight = plan_for(data, 6)
    train_run(straight, tmp_path / "straight")
    plan = plan_for(data, 6, checkpoint=saving(100))
    named = kept / f"step-{step:08d}"
    train_run(plan, tmp_path / "run", checkpoints=tmp_path / "root", resume=named)
    assert Outcome.read(tmp_path / "run") == Outcome.read(tmp_path / "straight")
    assert damage_in(named) is None and not (tmp_path / "root").exists()
    hashes = [read_json(tmp_path / n / "metrics.json")["params_hash"] for n in ("run", "straight")]
    assert hashes[0] == hashes[1]


def test_a_later_checkpoint_of_the_run_itself_comes_first(data, kept, tmp_path):
    """As after a restart."""
    root = tmp_path / "root"
    shutil.copytree(kept / "step-00000003", root / "step-00000003")
    plan = plan_for(data, 4, checkpoint=saving(100))
    (tmp_path / "none").mkdir()
    train_run(plan, tmp_path / "run", checkpoints=root, resume=tmp_path / "none")
    assert len(Outcome.read(tmp_path / "run").curve) == 4


def test_kept_ones_of_other_steps_stay(kept, tmp_path):
    target, root = shutil.copytree(kept, tmp_path / "kept"), tmp_path / "kept/running"
    shutil.copytree(kept / "step-00000003", root / "step-00000003")
    shutil.copytree(kept / "step-00000003", root / "step-00000004")
    (target / "step-00000003/checkpoint.json").unlink()
    # of a process that was killed while it removed one of this step
    shutil.copytree(kept / "step-00000002", target / ".step-00000003.partial")
    Folder(root).keep(target)
    Folder(root).remove()
    assert Folder(target).steps() == [2, 3, 4] and not root.exists()
    assert damage_in(target / "step-00000003") is None


def test_what_does_not_fit_is_one_line(data, kept, tmp_path):
    named = kept / "step-00000002"
    options = {"checkpoint": saving(100)}
    plan = plan_for(data, 6, **options)
    assert refusal(dataclasses.replace(plan, model=Model(preset="small")), named, tmp_path) == (
        f'{named}: made with model.preset "tiny", now it is "small": set it back, or name another'
    )
    seeded = refusal(dataclasses.replace(plan, seed=2), named, tmp_path)
    assert seeded == f"{named}: made with seed 1, now it is 2: set it back, or name another"
    cosine = refusal(plan_for(data, 6, decay="cosine", **options), named, tmp_path)
    assert 'train.decay "constant", now it is "cosine": set it back, or name another, or' in cosine
    ended = refusal(plan_for(data, 2, **options), kept / "step-00000003", tmp_path)
    assert ended.endswith(
        "3 steps are done, train.steps is 2: set it to 3 or more, or name another"
    )
    nothing = refusal(plan, tmp_path, tmp_path)
    assert nothing == (
        f"{tmp_path}/checkpoint.json: no such file: name another checkpoint, a folder such as "
        "step-00000050"
    )
    assert damage_in(named) is None


def test_with_a_cosine_the_number_of_steps_counts(data, tmp_path):
    plan = plan_for(data, 3, decay="cosine", checkpoint=saving(3))
    train_run(plan, tmp_path / "run", checkpoints=tmp_path / "a", kept=tmp_path / "kept")
    longer = plan_for(data, 6, decay="cosine", checkpoint=saving(100))
    said = refusal(longer, tmp_path / "kept/step-00000003", tmp_path)
    assert "made with train.steps 3, now it is 6" in said
    constant = plan_for(data, 6, checkpoint=saving(100))
    said = refusal(constant, tmp_path / "kept/step-00000003", tmp_path)
    assert 'made with train.decay "cosine", now it is "constant"' in said


def test_earlier_steps_have_the_same_residuals_on_other_ranks(data, tmp_path):
    strategy = strategy_of("ddp", **INT4)
    plan = plan_of(data, strategy, 3, **SHORT, steps=2, checkpoint=saving(2))
    train_run(plan, tmp_path / "three", checkpoints=tmp_path / "a", kept=tmp_path / "kept")
    options = saving(100, elastic=True)
    fewer = plan_of(data, strategy, 2, **SHORT, steps=3, checkpoint=options)
    named = tmp_path / "kept/step-00000002"
    train_run(fewer, tmp_path / "two", checkpoints=tmp_path / "b", resume=named)
    norms = {
        run: [event["residual_norm"] for event in read_json_lines(tmp_path / run / "events.jsonl")]
        for run in ("three", "two")
    }
    assert norms["two"][:2] == pytest.approx(norms["three"]) and norms["two"][2] > 0


@pytest.mark.long
def test_the_command_keeps_and_begins_from_a_checkpoint(data, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "data").symlink_to(data)
    sizes = {"batch_size": 2, "sequence_length": 16, "untimed_steps": 1, **SHORT}
    train = {"steps": 4, "checkpoint": {"every": 2, "folder": "kept"}, **sizes}
    tree = {"model": {"preset": "tiny"}, "strategies": {"a": {"engine": "ddp"}}, "train": train}
    (project / "run.json").write_text(json.dumps(tree))

    def call(*arguments):
        folder = tmp_path / f"command{len([*tmp_path.iterdir()])}"
        line = ["shardlab", "train", "--params", "run.json", "--run", "a", *arguments]
        command = typed(folder, project, *line)
        return command.wait(60), command.said()

    assert call()[0] == 0
    kept = project / "kept/a/seed0"
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000002", "step-00000004"]
    named = "kept/a/seed0/step-00000004"
    code, said = call("--set", "train.steps=6", "--resume", named)
    assert code == 0 and f"continues after step 4 ({named})" in said
    assert sorted(path.name for path in kept.iterdir())[-1] == "step-00000006"
    code, said = call("--set", "train.checkpoint=null", "--resume", named)
    assert (code, said.count("\n")) == (2, 1)
    assert f"--resume {named}: give --set train.checkpoint.every=N as well" in said
