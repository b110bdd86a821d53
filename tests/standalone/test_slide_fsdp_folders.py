"""What is in a folder of `SlideFSDP.save`, and what it may replace."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import shardlab
from shardlab.core.errors import UserError
from tests.ranks import on_ranks, run_ranks
from tests.standalone.test_slide_fsdp import model_of, tokens_of, trained
from tests.standalone.test_slide_fsdp_saving import INT4, refused, slid

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


def test_dropout_goes_on_bit_for_bit(tmp_path):
    def dropping(seed):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes)).train()
        torch.manual_seed(seed + dist.get_rank())
        return shardlab.SlideFSDP(model, shardlab.SlideConfig(learning_rate=1e-3))

    def on_rank(group):
        straight = dropping(0)
        trained(straight, 0, 2)
        straight.save(tmp_path / "saved")
        expected = trained(straight, 2, 5)
        other = dropping(7)
        other.load(tmp_path / "saved")
        assert trained(other, 2, 5) == expected
        return {}

    run_ranks(2, on_rank)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_one_of_the_ranks_wrote_is_not_missed_in_silence(tmp_path, ranks):
    def save(group):
        sliding = slid(**INT4)
        trained(sliding, 0, 2)
        sliding.save(tmp_path / "saved")
        return {}

    def load(group):
        line = refused(lambda: slid(**INT4).load(tmp_path / "saved"))
        assert line == (
            f"{tmp_path}/saved/rank-00001.safetensors: missing: load another folder, or remove "
            "rank-*.safetensors from the folder to begin without what was held back"
        )
        return {}

    run_ranks(3, save)
    (tmp_path / "saved/rank-00001.safetensors").unlink()
    run_ranks(ranks, load)


@pytest.mark.parametrize("file", ["slide.safetensors", "rank-00001.safetensors", "slide.json"])
@on_ranks(2)
def test_one_bit_that_fell_over_is_told(tmp_path, file) -> None:
    sliding = slid()
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
def test_folders_that_are_none_are_told_in_one_line(tmp_path, monkeypatch) -> None:
    sliding = slid()
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
def test_nobody_takes_or_loads_what_the_model_shows_between_its_uses(tmp_path) -> None:
    model = model_of("llama-untied")
    weights = model.state_dict()
    sliding = shardlab.SlideFSDP(model)
    sliding(input_ids=tokens_of(0, 0), labels=tokens_of(0, 0))
    for module in (model, model.model.layers[2]):
        with pytest.raises(UserError, match=r"^state_dict: .* take SlideFSDP.state_dict"):
            module.state_dict()
    with pytest.raises(UserError, match=r"state_dict: .* take SlideFSDP.state_dict"):
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"^load_state_dict: .* SlideFSDP.load"):
        model.load_state_dict(weights)
    model.save_pretrained(tmp_path / "model", state_dict=sliding.state_dict())
