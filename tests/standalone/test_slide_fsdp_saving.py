"""What `SlideFSDP` saves with codecs, and what goes wrong on one rank, which all hear of."""

import resource

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.core.errors import UserError
from shardlab.transport.object_collectives import gather_values
from tests.ranks import on_ranks, run_ranks
from tests.standalone.test_slide_fsdp import model_of, trained

INT4 = {"gradients": "int4:group=32", "error_feedback": True}
CODECS = {
    "int4": INT4,
    "gpu_reduce": INT4 | {"grad_sync": "gpu_reduce"},
    "random": {
        "gradients": {"name": "qsgd"},
        "weights": "int8",
        "param_transfer": "shard",
        "grad_sync": "gpu_reduce",
    },
}


def slid(seed=0, **config):
    config = {"learning_rate": 1e-3, "clip": 0.5, **config}
    return shardlab.SlideFSDP(model_of("gpt2-tied", seed), shardlab.SlideConfig(**config))


def communication_of(sliding):
    return sliding._engine.rank_state()["communication"]


def refused(call):
    """The line, which is the same on all ranks."""
    with pytest.raises(UserError) as told:
        call()
    [line] = {*gather_values(str(told.value), dist.group.WORLD)}
    assert "\n" not in line
    return line


@pytest.mark.parametrize("codecs", CODECS)
@on_ranks(2)
def test_what_codecs_keep_is_continued_bit_for_bit_and_without_it_is_not(tmp_path, codecs) -> None:
    straight = slid(**CODECS[codecs])
    trained(straight, 0, 3)
    straight.save(tmp_path / "saved")
    expected = trained(straight, 3, 7)
    other = slid(seed=5, **CODECS[codecs])
    trained(other, 0, 2)
    other.load(tmp_path / "saved")
    assert trained(other, 3, 7) == expected
    assert other.ledger.summary()["gradients"]["compression_ratio"] > 2
    if dist.get_rank() == 0:
        for path in (tmp_path / "saved").glob("rank-*"):
            path.unlink()
    dist.barrier()
    fresh = slid(seed=5, **CODECS[codecs])
    fresh.load(tmp_path / "saved")
    found = trained(fresh, 3, 7)
    assert found[0] == expected[0] and found != expected


def test_what_was_held_back_goes_to_another_number_of_ranks(tmp_path):
    def save(group):
        sliding = slid(**INT4)
        trained(sliding, 0, 3)
        sliding.save(tmp_path / "saved")
        return communication_of(sliding)

    def load(group):
        sliding = slid(seed=5, **INT4)
        sliding.load(tmp_path / "saved")
        found = communication_of(sliding)
        expected = shardlab.merge_states(states, 2, dist.get_rank())
        residuals = {name for name in expected if "residual" in name}
        assert residuals and all(torch.equal(found[name], expected[name]) for name in residuals)
        assert all(loss < 6 for loss in trained(sliding, 3, 6))
        return {}

    states = run_ranks(3, save)
    run_ranks(2, load)


@on_ranks(2)
def test_residuals_are_not_dropped_in_silence(tmp_path) -> None:
    sliding = slid(**INT4)
    trained(sliding, 0, 1)
    sliding.save(tmp_path / "saved")
    other = slid(gradients="int4:group=32")
    line = refused(lambda: other.load(tmp_path / "saved"))
    assert "set error_feedback=True, or remove rank-*.safetensors" in line
    if dist.get_rank() == 0:
        for path in (tmp_path / "saved").glob("rank-*"):
            path.unlink()
    dist.barrier()
    other.load(tmp_path / "saved")


@on_ranks(2)
def test_what_one_rank_cannot_read_is_told_by_all_and_changes_nothing(tmp_path) -> None:
    expected = trained(slid(**INT4), 0, 4)
    sliding = slid(**INT4)
    found = trained(sliding, 0, 2)
    sliding.save(tmp_path / "saved")
    if dist.get_rank() == 0:
        (tmp_path / "saved/rank-00001.safetensors").write_bytes(b"damaged")
    dist.barrier()
    line = refused(lambda: sliding.load(tmp_path / "saved"))
    assert line.startswith(f"{tmp_path}/saved/rank-00001.safetensors: damaged: load another")
    assert found + trained(sliding, 2, 4) == expected


@on_ranks(2)
def test_a_folder_that_one_rank_does_not_see_is_told_by_all(tmp_path) -> None:
    sliding = slid()
    sliding.save(tmp_path / "saved")
    seen = tmp_path if dist.get_rank() == 0 else tmp_path / "elsewhere"
    with pytest.raises(UserError, match=r"slide.json: there is none: name a folder"):
        sliding.load(seen / "saved")


@on_ranks(2)
def test_another_model_is_told_before_anything_is_taken(tmp_path) -> None:
    slid().save(tmp_path / "saved")
    config = shardlab.SlideConfig(learning_rate=1e-3, clip=0.5)
    other = shardlab.SlideFSDP(model_of("llama-untied"), config)
    before = other.state_dict()
    line = refused(lambda: other.load(tmp_path / "saved"))
    assert "of another model: parameter.model.embed_tokens.weight has the shape None" in line
    after = other.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("full", [0, 1])
@on_ranks(2)
def test_a_disk_that_is_full_for_one_rank_is_told_by_all_and_leaves_what_was_there(
    tmp_path, full
) -> None:
    sliding = slid(**INT4)
    trained(sliding, 0, 1)
    sliding.save(tmp_path / "saved")
    expected = trained(sliding, 1, 4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    line = refused(lambda: sliding.save(tmp_path / "saved"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "saved: cannot be written" in line and f"(rank {full}: " in line
    assert "too large" in line
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    sliding.load(tmp_path / "saved")
    assert trained(sliding, 1, 4) == expected


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"weights": "int8"}, "use param_transfer: shard"),
        ({"weights": "topk", "param_transfer": "shard"}, "weights need every element"),
        ({"weights": "int8", "param_transfer": "shard", "param_dtype": "bf16"}, "take float32"),
        ({"error_feedback": True}, "error_feedback is pointless"),
        ({"gradients": "int9"}, "int8"),
        ({"gradients": "int8", "error_feedback": True, "param_dtype": "fp16"}, "loss scale"),
        ({"activation_checkpointing": "none", "activations": "disk"}, "set activation_checkpoint"),
        ({"betas": (0.9, 1.0)}, "betas.1: input should be less than 1"),
        ({"learning_rate": -1.0}, "learning_rate: input should be greater than or equal to 0"),
        ({"accumulation": 0}, "accumulation: input should be greater"),
        ({"clip": 0.0}, "clip: input should be greater than 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_one_line(config, told):
    with pytest.raises(UserError, match=r"^SlideConfig[.:]") as refusal:
        shardlab.SlideConfig(**config)
    assert told in str(refusal.value) and "\n" not in str(refusal.value)
