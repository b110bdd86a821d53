"""Checkpoints that are damaged, incomplete, of another experiment or too large for the disk."""

import dataclasses
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.checkpoint import checkpoints
from shardlab.checkpoint.folder import Folder, read_manifest
from shardlab.core.errors import UserError
from shardlab.experiment.schema import Model
from shardlab.loop.loop import StepEvent
from tests.checkpoint.checkpointed import FORMATS, Run, plan_of, strategy_of
from tests.ranks import run_ranks

INT4_FSDP2 = strategy_of("fsdp2", codec="int4:group=64", error_feedback=True)


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory) -> Path:
    """Checkpoints of the steps 2 and 4, in both formats."""
    root = tmp_path_factory.mktemp("saved")

    def on_rank(group):
        for format in ("full", "sharded"):
            plan = plan_of(data, INT4_FSDP2)
            Run.start(plan, root / format, group, every=2, format=format).to(4)
        return {}

    run_ranks(2, on_rank)
    return root


def resumed_step(plan, root, **options) -> int:
    """Where a run continues."""
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


FILES = [
    ("full", "optimizer.safetensors"),
    ("full", "rank-00001.json"),
    ("sharded", "sharded/shard-00002-model-00001-of-00001.safetensors"),
]


@pytest.mark.parametrize("harm", ["missing", "damaged"])
@pytest.mark.parametrize("format, name", FILES)
def test_a_damaged_checkpoint_is_named_and_not_loaded(data, saved, tmp_path, format, name, harm):
    root = shutil.copytree(saved / format, tmp_path / "root")
    last = root / "step-00000004"
    if harm == "missing":
        (last / name).unlink()
    else:
        content = bytearray((last / name).read_bytes())
        content[len(content) // 2] ^= 1
        (last / name).write_bytes(content)
    plan = plan_of(data, INT4_FSDP2)
    assert refusal(plan, root) == (
        f"{last / name}: {harm}: remove {last} to continue from what was before it"
    )
    shutil.rmtree(last)
    assert resumed_step(plan, root) == 2


@pytest.mark.parametrize("content", [None, "{", "{}", '{"step": 4}'])
def test_damaged_manifest_is_named(data, saved, tmp_path, content):
    root = shutil.copytree(saved / "full", tmp_path / "root")
    manifest = root / "step-00000004/checkpoint.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    message = refusal(plan_of(data, INT4_FSDP2), root)
    what = "missing" if content is None else r"damaged \("
    assert message.startswith(f"{manifest}: ") and what.rstrip("\\(") in message
    assert message.endswith(f"remove {manifest.parent} to continue from what was before it")


def test_incomplete_checkpoint_is_removed(data, saved, tmp_path):
    root = shutil.copytree(saved / "full", tmp_path / "root")
    (root / "step-00000004").rename(root / ".step-00000006.partial")
    assert resumed_step(plan_of(data, INT4_FSDP2), root) == 2
    assert [path.name for path in root.iterdir()] == ["step-00000002"]


def test_a_checkpoint_of_another_experiment_is_refused(data, saved, tmp_path):
    root = saved / "full"
    plan = plan_of(data, INT4_FSDP2, learning_rate=0.5)
    assert refusal(plan, root) == (
        f"{root}/step-00000004: made with train.learning_rate 0.003, now it is 0.5: set it back, "
        f"or remove {root} to start anew, or set train.checkpoint.elastic: true to go on all the "
        "same"
    )
    assert resumed_step(plan, root, elastic=True) == 4
    other = plan_of(data, strategy_of("fsdp2"))
    assert 'strategy.gradients.codec.name "int4", now it is "none"' in refusal(other, root)
    assert resumed_step(other, root, elastic=True) == 4
    model = dataclasses.replace(plan, model=Model(preset="small"))
    for elastic in (False, True):
        assert refusal(model, root, elastic=elastic) == (
            f'{root}/step-00000004: made with model.preset "tiny", now it is "small": set it back, '
            f"or remove {root} to start anew"
        )


def test_settings_without_effect_on_steps_may_differ(data, saved):
    plan = plan_of(data, INT4_FSDP2, timeout_s=30.0, audit_steps=0, profiled_steps=1)
    assert resumed_step(plan, saved / "full", every=7, keep=1) == 4


@pytest.mark.parametrize("name", FORMATS)
def test_full_disk_keeps_the_previous_checkpoint(data, tmp_path, name):
    """Files beyond a size cannot be written by one rank, from step 4 on."""
    options = FORMATS[name]
    plan = plan_of(data, INT4_FSDP2)

    def on_rank(group):
        run = Run.start(plan, tmp_path, group, every=2, **options).to(3)
        if dist.get_rank(group) == (0 if name == "full" else 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
        run.to(5)
        return {}

    with pytest.raises(
        UserError, match=r"step-00000004.*: cannot be written \(.*large.*: free space"
    ):
        run_ranks(2, on_rank)
    assert Folder(tmp_path).steps() == [2]
    read_manifest(tmp_path / "step-00000002").verify(tmp_path / "step-00000002")
    assert resumed_step(plan, tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_checkpoint_of_another_version_is_refused(saved, data, tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class OfALaterVersion(StepEvent):
        figure: float

    root = shutil.copytree(saved / "sharded", tmp_path / "sharded")
    monkeypatch.setattr(checkpoints, "StepEvent", OfALaterVersion)
    said = refusal(plan_of(data, INT4_FSDP2), root, format="sharded")
    assert "another version of shardlab made it: remove it" in said
