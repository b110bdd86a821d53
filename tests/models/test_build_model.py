"""Shapes have their parameters; Hugging Face models fit the tokenizer or are refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MptConfig

from shardlab.core.errors import UserError
from shardlab.models.build import build_model
from shardlab.models.settings import GPT2_VOCABULARY, PRESETS, Model
from tests.families import FAMILIES, POSITIONS, VOCABULARY, config_of

TOKENS = torch.arange(POSITIONS)[None]


def build(model, vocabulary=VOCABULARY, positions=POSITIONS, seed=0):
    return build_model(model, vocabulary, positions, 7, seed)


def refusal(model, **fit):
    with pytest.raises(UserError) as caught:
        build(model, **fit)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sizes_in_the_documents_are_those_of_the_presets():
    page = Path(__file__).parents[2].joinpath("docs/how-to/models.md").read_text()
    rows = re.findall(
        r"^\| `([^`]+)`[^|]*\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M
    )
    sizes = {
        name: [
            f"{build(Model(preset=name), v, 128).module.num_parameters() / 1e6:.1f}"
            for v in (2048, 4096, GPT2_VOCABULARY)
        ]
        for name in PRESETS
    }
    assert {name: [*row] for name, _, *row in rows} == sizes
    assert all(PRESETS[name].heads == int(heads) for name, heads, *_ in rows)


def test_a_shape_needs_no_preset_and_may_change_one():
    given = Model(layers=3, width=96, heads=4)
    changed = Model(preset="tiny", layers=3)
    assert given.shape == changed.shape == (3, 96, 4)
    assert given.name == changed.name == "3x96, 4 heads"
    assert build(changed).module.config.n_layer == 3
    # what a preset is has its name
    assert Model(layers=6, width=256, heads=8).name == Model(preset="6x256").name == "6x256"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            (given, "give one of preset .*, pretrained and config")
            for given in (
                {},
                {"preset": "tiny", "config": "a"},
                {"pretrained": "a", "config": "a"},
                {"layers": 2, "pretrained": "a"},
            )
        ),
        ({"layers": 2, "width": 64}, "give layers, width and heads, or a preset that they change"),
        ({"preset": "tiny", "heads": 5}, "width 96 is no multiple of 5 heads: change one of them"),
    ],
)
def test_what_is_no_model_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        Model(**given)


def test_built_model_is_on_the_meta_device():
    built = build(Model(preset="20x1024"))
    assert all(tensor.is_meta for tensor in [*built.module.parameters(), *built.module.buffers()])


@pytest.mark.parametrize("family", FAMILIES)
def test_model_is_built_from_a_configuration(family, tmp_path):
    config = config_of(family)
    config.save_pretrained(tmp_path)
    expected = type(AutoModelForCausalLM.from_config(config))
    model = build(Model(config=str(tmp_path / "config.json"))).whole()
    assert type(model) is expected and model.training
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == config.tie_word_embeddings
    first = model(input_ids=TOKENS)
    assert first.logits.isfinite().all() and first.past_key_values is None
    assert torch.equal(first.logits, model(input_ids=TOKENS).logits), "no dropout"


def test_a_shape_drops_embeddings_residual_branches_and_attention():
    config = build(Model(preset="tiny", dropout=0.1)).module.config
    assert (config.embd_pdrop, config.resid_pdrop, config.attn_pdrop) == (0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("llama", {}, {"attention_dropout": 0.3}),
        ("mixtral", {"router_jitter_noise": 0.4}, {"attention_dropout": 0.3}),
        ("gpt2", {"summary_first_dropout": 0.4}, {"resid_pdrop": 0.3, "attn_pdrop": 0.3}),
    ],
)
def test_dropout_of_huggingface_models_has_the_names_of_their_configurations(
    family, changes, settings, tmp_path
):
    """Other noise stays off; evaluation drops nothing."""
    config_of(f"{family}-tied", **changes).save_pretrained(tmp_path)
    model = build(Model(config=str(tmp_path), dropout=0.3)).whole()
    assert {name: getattr(model.config, name) for name in settings} == settings
    assert {getattr(model.config, name) for name in changes} <= {0}
    first, second = (model(input_ids=TOKENS).logits for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(*(model(input_ids=TOKENS).logits for _ in range(2)))


def test_a_model_without_dropout_is_not_to_drop(tmp_path):
    MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    assert re.fullmatch(
        r"model\.dropout: MambaForCausalLM of model\.config '.*' has no dropout: remove it",
        refusal(Model(config=str(tmp_path), dropout=0.1)),
    )


def test_a_configuration_that_takes_no_dropout_says_where(tmp_path):
    MptConfig(vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2).save_pretrained(tmp_path)
    assert refusal(Model(config=str(tmp_path), dropout=0.1)) == (
        "model.dropout: attn_pdrop of its configuration cannot be 0.1: remove it"
    )


def test_results_from_before_dropout_are_those_without():
    assert "dropout" not in Model(preset="tiny", dropout=0.0).meaning()
    assert Model(preset="tiny", dropout=0.1).meaning()["dropout"] == 0.1


def test_router_jitter_is_disabled(tmp_path):
    config_of("mixtral-tied", router_jitter_noise=0.3).save_pretrained(tmp_path)
    model = build(Model(config=str(tmp_path))).whole()
    assert model.config.router_jitter_noise == 0
    assert torch.equal(*(model(input_ids=TOKENS).logits for _ in range(2)))


@pytest.mark.parametrize("key", ["config", "pretrained"])
def test_documents_end_with_the_token_of_the_tokenizer(key, tmp_path):
    config = config_of("llama-tied", eos_token_id=[1, 2])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = build(Model(**{key: str(tmp_path)})).module.config
    assert (found.bos_token_id, found.eos_token_id) == (7, 7)


@pytest.mark.parametrize("key", ["config", "pretrained"])
def test_embedding_of_the_padding_token_is_trained(key, tmp_path):
    config = config_of("llama-untied", pad_token_id=7, eos_token_id=7)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = build(Model(**{key: str(tmp_path)})).whole()
    model(input_ids=TOKENS).logits.logsumexp(-1).sum().backward()
    assert model.model.embed_tokens.weight.grad[7].any()


def small(model_type, **values):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    return {"model_type": model_type, **sizes, "num_attention_heads": 4, **values}


def logits_of_two_endings(model):
    """Of sequences that differ in the last token."""
    later = torch.cat([TOKENS[:, :-1], TOKENS[:, -1:] + 1], 1)
    return [model(input_ids=tokens).logits for tokens in (TOKENS, later)]


@pytest.mark.parametrize("kind", ["bert", "roformer", "electra"])
def test_encoders_are_refused(kind, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(kind)))
    assert "is an encoder" in refusal(Model(config=str(path)))
    path.write_text(json.dumps(small(kind, is_decoder=True, intermediate_size=48)))
    first, second = logits_of_two_endings(build(Model(config=str(path))).whole())
    assert torch.equal(first[:, :-1], second[:, :-1]) and not torch.equal(first, second)


def test_an_encoder_of_sound_beside_a_causal_model_is_not_refused(tmp_path):
    part = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    text = {**part, "model_type": "qwen3", "vocab_size": VOCABULARY, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": POSITIONS}
    audio = {**part, "num_attention_heads": 4, "max_source_positions": 8}
    path, kind = tmp_path / "config.json", "moss_transcribe_diarize"
    path.write_text(json.dumps({"model_type": kind, "audio_config": audio, "text_config": text}))
    first, second = logits_of_two_endings(build(Model(config=str(path))).whole())
    assert torch.equal(first[:, :-1], second[:, :-1]) and not torch.equal(first, second)


def test_causal_models_are_not_refused_for_a_setting_that_they_ignore(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small("gpt_neox", intermediate_size=48, is_decoder=False)))
    assert build(Model(config=str(path))).whole()(input_ids=TOKENS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        # its positions begin after that of the padding
        (small("roberta", is_decoder=True, max_position_embeddings=34, pad_token_id=1), 32),
        ({"model_type": "mpt", "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}, 16),
    ],
    ids=["roberta", "mpt"],
)
def test_positions_under_other_names_are_counted(config, longest, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
    model = build(Model(config=str(path)), positions=longest).whole()
    assert model(input_ids=TOKENS[:, :longest]).logits.isfinite().all()
    message = refusal(Model(config=str(path)), positions=longest + 1)
    assert f"train.sequence_length: {longest + 1}, but" in message
    assert message.endswith(f"has {longest} positions: lower it")


@pytest.mark.parametrize("key", ["config", "pretrained"])
def test_model_that_does_not_fit_is_refused(key, tmp_path):
    AutoModelForCausalLM.from_config(config_of("llama-tied")).save_pretrained(tmp_path)
    model = Model(**{key: str(tmp_path)})
    small = refusal(model, vocabulary=VOCABULARY + 1)
    assert small.startswith(f"model.{key}: vocabulary of {VOCABULARY} tokens, but the tokenizer")
    short = refusal(model, positions=POSITIONS + 1)
    assert short.startswith(f"train.sequence_length: {POSITIONS + 1}, but model.{key}")
    assert "absent', which is no folder or file here" in refusal(
        Model(**{key: f"{tmp_path}/absent"})
    )


def test_other_configurations_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert "cannot load" in refusal(Model(config=str(path)))
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 30, "vocab_size": 300}))
    assert "hidden" in refusal(Model(config=str(path)))
    path.write_text(json.dumps({"model_type": "clip_vision_model"}))
    assert "no causal language model" in refusal(Model(config=str(path)))
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    config_of("llama-tied", **quantized).save_pretrained(tmp_path)
    assert "quantized" in refusal(Model(config=str(path)))
    remote = {"auto_map": {"AutoConfig": "x.Y"}, "model_type": "theirs"}
    path.write_text(json.dumps(remote))
    assert "cannot load" in refusal(Model(config=str(path)))
