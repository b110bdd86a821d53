"""Checkpoints that are damaged, incomplete, of another experiment or too large for the disk."""

import dataclasses
import resource
import shutil
from pathlib import Path
from threading import Event
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.models.settings import Model
from shardlab.train.checkpoint_folder import CheckpointManifest, Folder, damage_in
from tests.ranks import on_ranks, run_ranks
from tests.train.checkpointed import FORMATS, Run, plan_of, strategy_of

INT4_FSDP2 = strategy_of("fsdp2", codec="int4:group=64", error_feedback=True)


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory) -> Path:
    """Checkpoints of the steps 1 and 2, in both formats."""
    root = tmp_path_factory.mktemp("saved")

    def on_rank(group):
        for format in ("full", "sharded"):
            plan = plan_of(data, INT4_FSDP2)
            Run.start(plan, root / format, group, every=1, format=format).to(2)

    run_ranks(2, on_rank)
    return root


def resumed_step(plan, root, **options) -> int:
    """Step that a run continues from."""
    results = run_ranks(
        2, lambda group: {"step": torch.tensor(Run.start(plan, root, group, **options).loop.step)}
    )
    return int(results[0]["step"])


def refusal(plan, root, **options) -> str:
    with pytest.raises(UserError) as error:
        resumed_step(plan, root, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


def damage(path: Path, harm: str = "damaged") -> None:
    if harm == "missing":
        path.unlink()
        return
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("format", "name", "harm"),
    [
        ("full", "optimizer.safetensors", "damaged"),
        ("full", "checkpoint.json", "damaged"),
        ("sharded", "sharded/shard-00002-model-00001-of-00001.safetensors", "missing"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(
    data, saved, tmp_path, format, name, harm
):
    root = shutil.copytree(saved / format, tmp_path / "root")
    last = root / "step-00000002"
    damage(last / name, harm)
    plan = plan_of(data, INT4_FSDP2)
    found = damage_in(last)
    assert found is not None and found.startswith(f"{last / name}: {harm}") and "\n" not in found
    assert resumed_step(plan, root) == 1
    last.rename(root / ".step-00000003.partial")  # as one that was not completed
    damage(root / "step-00000001" / name, harm)
    message = refusal(plan, root)
    assert message.startswith(f"{root}/step-00000001/{name}: {harm}")
    assert message.endswith(f"no checkpoint before it is whole: remove {root} to start anew")
    Folder(root).remove()
    assert not root.exists()


@on_ranks(1)
def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(group, data, tmp_path):
    """The last ones are kept."""
    plan = plan_of(data, INT4_FSDP2, 1)
    Run.start(plan, tmp_path, group, every=1, keep=2).to(3)
    damage(tmp_path / "step-00000003/optimizer.safetensors")
    resumed = Run.start(plan, tmp_path, group, every=1, keep=2)
    assert resumed.loop.step == 2
    resumed.to(3)
    assert Folder(tmp_path).steps() == [2, 3]
    assert damage_in(tmp_path / "step-00000003") is None


@on_ranks(1)
def test_training_goes_on_while_an_asynchronous_checkpoint_is_written(group, data, tmp_path):
    plan, last = plan_of(data, strategy_of("ddp"), 1), tmp_path / "step-00000001"
    may_end, commit = Event(), Folder.commit
    run = Run.start(plan, tmp_path, group, every=1, **FORMATS["asynchronous"])
    with patch.object(Folder, "commit", lambda *a: may_end.wait(20) and commit(*a)):
        run.loop.run(1, lambda event: run.checkpoints.step_done([event]))
        assert not last.exists()
        may_end.set()
        run.checkpoints.wait()
    assert last.exists()


@pytest.mark.long
def test_a_checkpoint_of_another_experiment_is_refused(data, saved):
    root = saved / "full"
    plan = plan_of(data, INT4_FSDP2, learning_rate=0.5)
    assert refusal(plan, root) == (
        f"{root}/step-00000002: made with train.learning_rate 0.003, now it is 0.5: set it back, "
        f"or remove {root} to start anew, or set train.checkpoint.elastic: true to go on all the "
        "same"
    )
    other = plan_of(data, strategy_of("fsdp2"))
    assert 'strategy.gradients.codec.name "int4", now it is "none"' in refusal(other, root)
    for allowed in (plan, other):
        assert resumed_step(allowed, root, elastic=True) == 2
    muon = plan_of(data, strategy_of("ddp"), optimizer="muon")
    assert refusal(muon, root, elastic=True) == (
        f'{root}/step-00000002: made with train.optimizer "adamw", now it is "muon": set it back, '
        f"or remove {root} to start anew"
    )
    path = root / "step-00000002"
    done, ends = (
        CheckpointManifest.read(path),
        CheckpointManifest.of(plan_of(data, INT4_FSDP2, steps=2), "full"),
    )
    with pytest.raises(UserError, match=r": 3 steps are done, train.steps is 2: set it to 3 or"):
        done.model_copy(update={"step": 3}).refuse_other(ends, path, elastic=True)
    for saved_as in ("full", "sharded"):
        wider = plan_of(data, INT4_FSDP2, sequence_length=8)
        said = refusal(wider, saved / saved_as, elastic=True)
        assert "train.sequence_length" in said and " shape [" in said
    model = dataclasses.replace(plan, model=Model(preset="small"))
    assert refusal(model, root, elastic=True) == (
        f'{root}/step-00000002: made with model.preset "tiny", now it is "small": set it back, '
        f"or remove {root} to start anew"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["full", "asynchronous"])
def test_full_disk_keeps_the_previous_checkpoint(data, tmp_path, name):
    """Files beyond a size cannot be written by one rank, from step 4 on."""
    options = FORMATS[name]
    plan = plan_of(data, INT4_FSDP2)

    def on_rank(group):
        run = Run.start(plan, tmp_path, group, every=2, **options).to(3)
        if dist.get_rank(group) == (0 if name == "full" else 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
        run.to(5)

    with pytest.raises(
        UserError, match=r"step-00000004.*: cannot be written \(.*large.*: free space"
    ):
        run_ranks(2, on_rank)
    assert Folder(tmp_path).steps() == [2]
    assert damage_in(tmp_path / "step-00000002") is None
    assert resumed_step(plan, tmp_path) == 2
