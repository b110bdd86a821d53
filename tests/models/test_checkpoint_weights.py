"""Weights of a checkpoint match those of from_pretrained."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DiffLlamaConfig, PhimoeConfig

from shardlab.core.errors import UserError
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from tests.families import FAMILIES, POSITIONS, VOCABULARY, config_of

TOKENS = torch.arange(POSITIONS)[None]
FILE = "model.safetensors"
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    # beyond 0.02, so that experts differ
    "initializer_range": 0.3,
}


def random_model(family, **changes):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config_of(family, **changes))


def build(folder):
    return build_model(Model(pretrained=str(folder)), VOCABULARY, POSITIONS, 0, seed=0)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def change(folder, function):
    """Replace the tensors of a checkpoint by `function` of them."""
    tensors = function(load_file(folder / FILE))
    save_file(tensors, folder / FILE, {"format": "pt"})


def refusal(folder):
    with pytest.raises(UserError) as caught:
        build(folder).whole()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(params=FAMILIES, scope="module")
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    random_model(request.param).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path):
    random_model("llama-untied").save_pretrained(tmp_path)
    return tmp_path


def test_logits_match_from_pretrained_bit_for_bit(saved):
    expected = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert torch.equal(logits(build(saved).whole()), logits(expected))


@pytest.mark.parametrize("family", ["gpt2-tied", "llama-tied", "mixtral-untied"])
def test_checkpoint_in_several_files(family, tmp_path):
    model = random_model(family)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(build(tmp_path).whole()), logits(model))


@pytest.mark.parametrize("family", ["gpt2-tied", "llama-tied", "qwen3-tied"])
def test_checkpoint_without_base_model_prefix(family, tmp_path):
    model = random_model(family)
    model.base_model.save_pretrained(tmp_path)
    assert not any(n.startswith(("model.", "transformer.")) for n in load_file(tmp_path / FILE))
    assert torch.equal(logits(build(tmp_path).whole()), logits(model))


def test_either_name_of_tied_weights_is_accepted(tmp_path):
    model = random_model("llama-tied")
    model.save_pretrained(tmp_path)
    change(
        tmp_path,
        lambda t: {n.replace("model.embed_tokens", "lm_head"): v for n, v in t.items()},
    )
    assert "lm_head.weight" in load_file(tmp_path / FILE)
    assert torch.equal(logits(build(tmp_path).whole()), logits(model))


def test_half_precision_becomes_float32(llama):
    change(llama, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()})
    model = build(llama).whole()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    expected = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.long
def test_hub_name_is_read_from_the_cache(tmp_path):
    snapshot = tmp_path / "models--someone--something" / "snapshots" / ("0" * 40)
    model = random_model("qwen2-tied")
    model.save_pretrained(snapshot)
    (refs := snapshot.parents[1] / "refs").mkdir()
    (refs / "main").write_text("0" * 40)
    code = (
        "import test_checkpoint_weights as t\n"
        "model = t.build('someone/something').whole()\n"
        f"expected = t.AutoModelForCausalLM.from_pretrained({str(snapshot)!r})\n"
        "assert t.torch.equal(t.logits(model), t.logits(expected))\n"
    )
    cache = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **cache}, check=True)


def test_missing_weights_are_named(llama):
    change(llama, lambda t: {n: v for n, v in t.items() if "layers.1.mlp" not in n})
    assert "no weights for model.layers.1.mlp.gate_proj.weight and 2 more" in refusal(llama)


def test_weights_of_another_shape_are_named(llama):
    change(llama, lambda t: {**t, "model.norm.weight": torch.ones(3)})
    assert "model.norm.weight of shape [3], its config.json means [64]" in refusal(llama)


def float8_with_scales(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    small = tensors[name].to(torch.float8_e4m3fn)
    return {**tensors, name: small, f"{name}_scale_inv": torch.ones(1)}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (float8_with_scales, "layers.1.mlp.up_proj.weight_scale_inv is of a quantized model"),
        (lambda t: {**t, "model.layers.3.x": torch.ones(3)}, "holds model.layers.3.x, which"),
        (
            lambda t: {**t, "model.norm.weight": t["model.norm.weight"].to(torch.float8_e5m2)},
            "holds model.norm.weight in float8_e5m2, but quantized weights cannot be trained",
        ),
        (
            lambda t: {**t, "model.norm.weight": torch.ones(64, dtype=torch.int8)},
            "holds model.norm.weight in int8, but quantized weights cannot be trained",
        ),
    ],
)
def test_weights_of_another_model_are_named(llama, function, words):
    change(llama, function)
    assert words in refusal(llama)


def test_layers_that_the_configuration_leaves_out_are_named(llama):
    config_of("llama-untied", num_hidden_layers=2).save_pretrained(llama)
    assert "holds model.layers.2.input_layernorm.weight and 8 more" in refusal(llama)


def test_buffers_of_older_versions_are_left_out(llama):
    change(llama, lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    expected = AutoModelForCausalLM.from_pretrained(llama)
    assert torch.equal(logits(build(llama).whole()), logits(expected))


@pytest.mark.parametrize(
    "config",
    [
        # draws parameters on the CPU though it is made on the meta device
        DiffLlamaConfig(**SIZES),
        # its noise setting is a threshold of the router
        PhimoeConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.4),
    ],
    ids=lambda config: config.model_type,
)
def test_logits_of_special_families_match_from_pretrained(config, tmp_path):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(build(tmp_path).whole()), logits(expected))


def test_tied_weights_that_differ_are_refused(tmp_path):
    random_model("llama-tied").save_pretrained(tmp_path)
    same = "model.embed_tokens.weight"
    change(tmp_path, lambda t: {**t, "lm_head.weight": t[same].clone()})
    build(tmp_path).whole()
    change(tmp_path, lambda t: {**t, "lm_head.weight": t[same] + 1})
    assert "set tie_word_embeddings in its config.json to false" in refusal(tmp_path)


def test_nothing_is_unpickled(llama):
    (llama / FILE).rename(llama / "pytorch_model.bin")
    assert "nothing is unpickled here: convert it to safetensors" in refusal(llama)
    (llama / "pytorch_model.bin").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(llama)


def test_damaged_files_are_named(llama):
    (llama / FILE).write_bytes((llama / FILE).read_bytes()[:-5])
    assert f"{llama / FILE}: damaged" in refusal(llama)
    (llama / FILE).unlink()
    index = llama / "model.safetensors.index.json"
    index.write_text("[1")
    assert "not an index of safetensors files" in refusal(llama)
    random_model("llama-untied").save_pretrained(llama, max_shard_size="50KB")
    first = sorted(llama.glob("*.safetensors"))[0]
    first.unlink()
    assert f"has no {first.name}, which its model.safetensors.index.json names" in refusal(llama)
