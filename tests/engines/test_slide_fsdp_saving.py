"""Folders of `SlideFSDP.save`: contents, codecs, what may be replaced, errors on one rank."""

import os
import resource
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import shardlab
from shardlab.core.errors import UserError
from tests.engines.sliding_factory import INT4, model_of, refused, slid, trained
from tests.ranks import on_ranks, run_ranks

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


def gpt2(seed=0):
    return model_of("gpt2-tied", seed)


def communication_of(sliding):
    return sliding._engine.rank_state()["communication"]


@pytest.mark.parametrize("codecs", CODECS)
@on_ranks(2)
def test_codec_state_is_needed_to_match_the_uninterrupted_run(tmp_path, codecs) -> None:
    straight = slid(gpt2(), **CODECS[codecs])
    trained(straight, 0, 2)
    straight.save(tmp_path / "saved")
    expected = trained(straight, 2, 4)
    other = slid(gpt2(5), **CODECS[codecs])
    trained(other, 0, 1)
    other.load(tmp_path / "saved")
    assert trained(other, 2, 4) == expected
    assert other.ledger.summary()["gradients"]["compression_ratio"] > 2
    if dist.get_rank() == 0:
        for path in (tmp_path / "saved").glob("rank-*"):
            path.unlink()
    dist.barrier()
    fresh = slid(gpt2(5), **CODECS[codecs])
    fresh.load(tmp_path / "saved")
    found = trained(fresh, 2, 4)
    assert found[0] == expected[0] and found != expected


def test_residuals_are_merged_for_another_number_of_ranks(tmp_path):
    def save(group):
        sliding = slid(gpt2(), **INT4)
        trained(sliding, 0, 3)
        sliding.save(tmp_path / "saved")
        return communication_of(sliding)

    def load(group):
        sliding = slid(gpt2(5), **INT4)
        sliding.load(tmp_path / "saved")
        found = communication_of(sliding)
        expected = shardlab.merge_states(states, 2, dist.get_rank())
        residuals = {name for name in expected if "residual" in name}
        assert residuals and all(torch.equal(found[name], expected[name]) for name in residuals)
        assert all(loss < 6 for loss in trained(sliding, 3, 6))

    states = run_ranks(3, save)
    run_ranks(2, load)


@on_ranks(2)
def test_residuals_are_not_dropped_in_silence(tmp_path) -> None:
    sliding = slid(gpt2(), **INT4)
    trained(sliding, 0, 1)
    sliding.save(tmp_path / "saved")
    other = slid(gpt2(), gradients="int4:group=32")
    line = refused(lambda: other.load(tmp_path / "saved"))
    assert "set error_feedback=True, or remove rank-*.safetensors" in line
    if dist.get_rank() == 0:
        for path in (tmp_path / "saved").glob("rank-*"):
            path.unlink()
    dist.barrier()
    other.load(tmp_path / "saved")


@on_ranks(2)
def test_unreadable_file_of_one_rank_is_raised_on_all_and_changes_nothing(tmp_path) -> None:
    expected = trained(slid(gpt2(), **INT4), 0, 4)
    sliding = slid(gpt2(), **INT4)
    found = trained(sliding, 0, 2)
    sliding.save(tmp_path / "saved")
    if dist.get_rank() == 0:
        (tmp_path / "saved/rank-00001.safetensors").write_bytes(b"damaged")
    dist.barrier()
    line = refused(lambda: sliding.load(tmp_path / "saved"))
    assert line.startswith(f"{tmp_path}/saved/rank-00001.safetensors: damaged: load another")
    assert found + trained(sliding, 2, 4) == expected


@on_ranks(2)
def test_folder_missing_on_one_rank_is_raised_on_all(tmp_path) -> None:
    sliding = slid(gpt2())
    sliding.save(tmp_path / "saved")
    seen = tmp_path if dist.get_rank() == 0 else tmp_path / "elsewhere"
    with pytest.raises(UserError, match=r"slide.json: there is none: name a folder"):
        sliding.load(seen / "saved")


@on_ranks(2)
def test_checkpoint_of_another_model_is_refused_before_loading(tmp_path) -> None:
    slid(gpt2()).save(tmp_path / "saved")
    other = slid(model_of("llama-untied"))
    before = other.state_dict()
    line = refused(lambda: other.load(tmp_path / "saved"))
    assert "of another model: parameter.model.embed_tokens.weight has the shape None" in line
    after = other.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("full", [0, 1])
@on_ranks(2)
def test_full_disk_on_one_rank_is_raised_on_all_and_keeps_the_old_folder(tmp_path, full) -> None:
    sliding = slid(gpt2(), **INT4)
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
    ("config", "reported"),
    [
        ({"weights": "int8"}, "use param_transfer: shard"),
        ({"weights": "topk", "param_transfer": "shard"}, "weights need every element"),
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
def test_settings_that_do_not_go_together_are_refused_in_one_line(config, reported):
    with pytest.raises(UserError, match=r"^SlideConfig[.:]") as refusal:
        shardlab.SlideConfig(**config)
    assert reported in str(refusal.value) and "\n" not in str(refusal.value)


PLAIN = shardlab.SlideConfig(learning_rate=1e-2, activation_checkpointing="none")


class Counting(nn.Module):
    """Has buffers of two types that a state dict has, one under two names, and one it has not."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)
        self.blocks[0].register_buffer("also", self.norm.running_mean)

    def forward(self, x):
        self.unsaved += 1
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return SimpleNamespace(loss=self.norm(x).pow(3).mean())


def counted(sliding, first, last):
    generator = torch.Generator().manual_seed(first)
    for _ in range(first, last):
        sliding(x=torch.randn(4, 8, generator=generator))


@on_ranks(1)
def test_buffers_that_a_state_dict_has_are_continued(tmp_path) -> None:
    models = Counting(), Counting()
    straight, other = (shardlab.SlideFSDP(model, PLAIN) for model in models)
    counted(straight, 0, 3)
    straight.save(tmp_path / "saved")
    expected = straight.state_dict()
    other.load(tmp_path / "saved")
    found = other.state_dict()
    assert {"norm.num_batches_tracked", "blocks.0.also"} <= found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert int(found["norm.num_batches_tracked"]) == 3
    assert [int(model.unsaved) for model in models] == [3, 0]


@on_ranks(2)
def test_dropout_resumes_bitwise(tmp_path) -> None:
    def dropping(seed):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes)).train()
        torch.manual_seed(seed + dist.get_rank())
        return shardlab.SlideFSDP(model, shardlab.SlideConfig(learning_rate=1e-3))

    straight = dropping(0)
    trained(straight, 0, 2)
    straight.save(tmp_path / "saved")
    expected = trained(straight, 2, 5)
    other = dropping(7)
    other.load(tmp_path / "saved")
    assert trained(other, 2, 5) == expected


@pytest.mark.parametrize("ranks", [2, 3])
def test_missing_file_of_one_rank_is_refused(tmp_path, ranks):
    def save(group):
        sliding = slid(gpt2(), **INT4)
        trained(sliding, 0, 2)
        sliding.save(tmp_path / "saved")

    def load(group):
        line = refused(lambda: slid(gpt2(), **INT4).load(tmp_path / "saved"))
        assert line == (
            f"{tmp_path}/saved/rank-00001.safetensors: missing: load another folder, or remove "
            "rank-*.safetensors from the folder to begin without what was held back"
        )

    run_ranks(3, save)
    (tmp_path / "saved/rank-00001.safetensors").unlink()
    run_ranks(ranks, load)


@pytest.mark.parametrize("file", ["slide.safetensors", "rank-00001.safetensors", "slide.json"])
@on_ranks(2)
def test_flipped_bit_is_detected(tmp_path, file) -> None:
    sliding = slid(gpt2())
    sliding.save(tmp_path / "saved")
    if dist.get_rank() == 0:
        content = bytearray((tmp_path / "saved" / file).read_bytes())
        content[-5] ^= 1
        (tmp_path / "saved" / file).write_bytes(content)
    dist.barrier()
    assert f"{file}: damaged" in refused(lambda: sliding.load(tmp_path / "saved"))


@on_ranks(2)
def test_save_replaces_what_it_has_written_and_nothing_else(tmp_path) -> None:
    model, folder = model_of("llama-untied"), tmp_path / "model"
    sliding = shardlab.SlideFSDP(model)
    state = sliding.state_dict()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        (tmp_path / "file").write_text("precious")
        (tmp_path / "empty").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "empty")
    dist.barrier()
    before = sorted(path.name for path in folder.iterdir())
    line = refused(lambda: sliding.save(folder))
    assert line == (
        f"{folder}: it holds config.json, which save has not written and would remove: name "
        "another folder"
    )
    assert sorted(path.name for path in folder.iterdir()) == before
    assert "is a file: name a folder" in refused(lambda: sliding.save(tmp_path / "file"))
    for _ in range(2):
        sliding.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty/slide.json").is_file()
    sliding.load(tmp_path / "empty")


@on_ranks(1)
def test_invalid_folders_are_refused(tmp_path, monkeypatch) -> None:
    sliding = slid(gpt2())
    os.chdir(tmp_path)
    for folder in (".", "", tmp_path, tmp_path.parent):
        with pytest.raises(UserError, match="working directory cannot be replaced"):
            sliding.save(folder)
    for call in (sliding.save, sliding.load):
        for folder in (None, 5, ["saved"]):
            with pytest.raises(UserError, match=r"SlideFSDP\.(save|load): name a folder, not"):
                call(folder)
    with pytest.raises(UserError, match=r"slide\.json: there is none: name a folder"):
        sliding.load(tmp_path)
    sliding.save("saved")
    sliding.load("saved")


@on_ranks(1)
def test_state_dicts_of_the_model_itself_are_refused(tmp_path) -> None:
    model = model_of("llama-untied")
    weights = model.state_dict()
    sliding = shardlab.SlideFSDP(model)
    trained(sliding, 0, 1)
    for module in (model, model.model.layers[2]):
        with pytest.raises(UserError, match=r"^state_dict: .* take SlideFSDP.state_dict"):
            module.state_dict()
    with pytest.raises(UserError, match=r"state_dict: .* take SlideFSDP.state_dict"):
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"^load_state_dict: .* SlideFSDP.load"):
        model.load_state_dict(weights)
    model.save_pretrained(tmp_path / "model", state_dict=sliding.state_dict())
