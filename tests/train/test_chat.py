"""Conversations with saved models: sampling, history, templates, and the prompt line."""

import io
import json
import math
import shutil
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardlab.core.errors import UserError
from shardlab.core.files import write_json
from shardlab.data.tokenizer import number_tokenizer
from shardlab.train.chat import Conversation, Sampling, converse, printable
from tests.saved_model_factory import write_saved_model

POSITIONS = 80
ECHO = "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved model, not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    write_saved_model(folder, POSITIONS)
    return folder / "final_model"


def answers(folder, *prompts, **sampling):
    conversation, pieces = Conversation(folder, Sampling(**sampling)), []
    for prompt in prompts:
        pieces.append([])
        conversation.answer(prompt, pieces[-1].append)
    return ["".join(each) for each in pieces]


def greedy(folder, prompt, tokens):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    answer = loaded.generate(**ids, do_sample=False, max_new_tokens=tokens)[0]
    return tokenizer.decode(answer[ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_banner_says_what_the_model_is_and_saw(model, tmp_path):
    folder = tmp_path / "results/train/a/seed3/final_model"
    shutil.copytree(model, folder)
    conversation = Conversation(folder, Sampling())
    size = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    lines = [
        f"{folder}: gpt2, {size:,} parameters",
        "It continues text. Ctrl-C ends an answer, Ctrl-D the conversation.",
    ]
    assert conversation.banner().splitlines() == lines
    samples = {"batch_size": 8, "accumulation": 1, "world_size": 2, "sequence_length": 64}
    write_json(folder.parent / "metrics.json", {"steps": 10, **samples})
    assert conversation.banner().startswith(f"{lines[0]}, trained on 10,240 tokens\n")
    write_json(tmp_path / "results/validate/a/seed3.json", {"val_ppl": 622.84})
    assert ", trained on 10,240 tokens, validation perplexity 622.8\n" in conversation.banner()
    (folder / "chat_template.jinja").write_text(ECHO)
    assert "It answers in turns." in Conversation(folder, Sampling()).banner()


def test_equal_seeds_give_equal_answers(model):
    first = answers(model, "Some", "more", seed=1)
    assert answers(model, "Some", "more", seed=1) == first
    assert answers(model, "Some", "more", seed=2) != first


def test_temperature_0_is_the_greedy_answer_to_the_whole_history(model):
    first, second = answers(model, "Some words", "Then", temperature=0.0, tokens=8)
    assert first == greedy(model, "Some words", 8)
    assert second == greedy(model, f"Some words{first}\nThen", 8)
    # so small a share holds the likeliest token alone
    assert answers(model, "Some words", temperature=1.0, top_p=1e-6, tokens=8) == [first]


def test_a_tokenizer_that_ends_texts_does_not_end_the_prompt(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = [("<|endoftext|>", tokenizer.eos_token_id)]
    adds_end = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=end)
    tokenizer.backend_tokenizer.post_processor = adds_end
    tokenizer.save_pretrained(folder)
    expected = greedy(model, "Some words", 8)
    assert answers(folder, "Some words", temperature=0.0, tokens=8) == [expected]


def test_a_history_beyond_the_positions_is_answered(model):
    assert len(answers(model, *["and one more"] * 20, "word " * 500, "", tokens=4)) == 22


def test_a_model_of_numbers_says_that_its_tokenizer_is_to_be_named(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    number_tokenizer(300, 0).save(tmp_path / "model")
    with pytest.raises(UserError, match=r"nobody named: set tokenize\.tokenizer and run it again"):
        Conversation(tmp_path / "model", Sampling())


def test_a_chat_template_gets_the_turns(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(ECHO)
    _, second = answers(folder, "Hi", "Some words", temperature=0.0, tokens=8)
    assert second == greedy(model, "Some words", 8)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no turns') }}")
    with pytest.raises(UserError, match=r"^no answer: TemplateError: no turns"):
        answers(folder, "Hi")


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(1, 200)), "sequence_bias": [[[7], 100.0]]},
        {"max_time": 0.0, "num_beams": 3, "stop_strings": ["e"]},
        {"num_return_sequences": 2, "cache_implementation": "quantized"},
        {"min_p": 0.9, "typical_p": 0.05, "epsilon_cutoff": 0.5},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_the_folder_change_no_answer(model, tmp_path, settings):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **settings}))
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}):
        sampling["tokens"] = 12
        assert answers(folder, "Some", **sampling) == answers(model, "Some", **sampling)


def test_answer_ends_where_the_folder_says(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    ids = AutoTokenizer.from_pretrained(folder)(greedy(model, "Some words", 8))["input_ids"]
    settings = {"eos_token_id": [0, ids[3]]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    answer = answers(folder, "Some words", temperature=0.0, tokens=8)[0]
    assert len(AutoTokenizer.from_pretrained(folder)(answer)["input_ids"]) == ids.index(ids[3]) + 1


def test_answer_ends_at_the_end_token_of_the_tokenizer(model, tmp_path):
    """As of a chat template whose turns end otherwise than documents."""
    folder = shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(greedy(model, "Some words", 8))["input_ids"]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids[3])
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    answer = answers(folder, "Some words", temperature=0.0, tokens=8)[0]
    assert len(tokenizer(answer)["input_ids"]) <= ids.index(ids[3]) + 1
    assert len(answer) < len(greedy(model, "Some words", 8))


def test_pieces_are_the_growth_of_the_whole_answer(model, tmp_path):
    """The answer has line breaks before spaces and characters of several tokens."""
    folder = shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "ab\n  \u00e9t\u00e9 \u65e5\u672c \U0001f600 words\n\n end"
    wanted = tokenizer(text)["input_ids"]
    prompt = tokenizer("Some")["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # each position has its own answer
        for parameter in network.transformer.h.parameters():
            parameter.zero_()
        network.lm_head.weight = torch.nn.Parameter(torch.zeros_like(network.lm_head.weight))
        network.transformer.wte.weight.zero_()
        network.transformer.wpe.weight.zero_()
        for place, token in enumerate([*wanted, 0], start=len(prompt) - 1):
            network.transformer.wpe.weight[place, place] = 1
            network.lm_head.weight[token, place] += 1
    network.config.tie_word_embeddings = False
    network.save_pretrained(folder)
    conversation, pieces = Conversation(folder, Sampling(temperature=0.0, tokens=40)), []
    conversation.answer("Some", pieces.append)
    assert "".join(pieces) == text and len(pieces) > 8
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_finite_are_one_line(model, tmp_path, temperature):
    folder = shutil.copytree(model, tmp_path / "model")
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.transformer.h[0].mlp.c_fc.weight.data.fill_(math.nan)
    network.save_pretrained(folder)
    with pytest.raises(UserError, match=r"^no answer: the model's logits are not finite"):
        answers(folder, "Some", temperature=temperature)


def test_a_temperature_near_0_is_0(model):
    first = answers(model, "Some words", temperature=0.0, tokens=8)
    assert answers(model, "Some words", temperature=1e-40, tokens=8) == first


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_without_a_file_is_one_line(model, tmp_path, lost):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / lost).unlink()
    if lost == "model.safetensors":
        torch.save({}, folder / "pytorch_model.bin")  # nothing is unpickled
    with pytest.raises(UserError) as caught:
        Conversation(folder, Sampling())
    assert str(caught.value).startswith(f"{folder}: no ") and "\n" not in str(caught.value)


def test_a_name_that_is_no_folder_is_fetched_from_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        Conversation(Path("gpt2"), Sampling())
    assert str(caught.value).startswith("gpt2: no such folder: ")


def test_no_control_character_reaches_the_terminal():
    text = "".join(map(chr, range(0x3000)))
    controls = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    shown = printable(text)
    assert controls & {*shown} == {"\n", "\t", "\u200c", "\u200d"}
    assert {*text} - controls <= {*shown}
    assert printable("\ud800 \U000e0001") == r"\ud800 \U000e0001"


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyboardInterrupt(), ""), (UserError("no answer: on purpose"), "chat: error: no answer: on")],
)
def test_an_answer_that_ends_early_ends_no_conversation(monkeypatch, capsys, error, said):
    prompts = []

    class Ended:
        def answer(self, text, show):
            prompts.append(text)
            show("some")
            if len(prompts) == 1:
                raise error
            show(" words")

    latin1 = io.TextIOWrapper(io.BytesIO("first\n\n\xe9l\xe8ve\n".encode("latin-1")), "utf-8")
    monkeypatch.setattr(sys, "stdin", latin1)
    converse(Ended())
    shown = capsys.readouterr()
    assert (prompts, shown.out) == (["first", "\ufffdl\ufffdve"], "some\nsome words\n")
    assert shown.err.startswith(said)
