"""Conversations with saved models: sampling, history, templates, and the prompt line."""

import io
import shutil
import sys
import unicodedata

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardlab.core.errors import UserError
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


def test_a_history_beyond_the_positions_is_answered(model):
    assert len(answers(model, *["and one more"] * 20, "word " * 500, "", tokens=4)) == 22


def test_a_chat_template_gets_the_turns(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(ECHO)
    _, second = answers(folder, "Hi", "Some words", temperature=0.0, tokens=8)
    assert second == greedy(model, "Some words", 8)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no turns') }}")
    with pytest.raises(UserError, match=r"^no answer: TemplateError: no turns"):
        answers(folder, "Hi")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_without_a_file_is_one_line(model, tmp_path, lost):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / lost).unlink()
    if lost == "model.safetensors":
        torch.save({}, folder / "pytorch_model.bin")  # nothing is unpickled
    with pytest.raises(UserError) as caught:
        Conversation(folder, Sampling())
    assert str(caught.value).startswith(f"{folder}: no ") and "\n" not in str(caught.value)


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

    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\udcff\n"))
    converse(Ended())
    shown = capsys.readouterr()
    assert (prompts, shown.out) == (["first", "second?"], "some\nsome words\n")
    assert shown.err.startswith(said)
