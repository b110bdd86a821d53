"""Conversations with saved models: sampling, history, positions, templates, damaged folders."""

import shutil
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardlab.core.errors import UserError
from shardlab.train.conversation import Conversation, Sampling
from tests.saved_model_factory import write_saved_model

POSITIONS = 80
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with a saved model; not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    write_saved_model(folder, POSITIONS)
    return folder


@pytest.fixture
def final(run, tmp_path):
    """A copy to be changed."""
    return shutil.copytree(run, tmp_path / "run") / "final_model"


def answers(folder, *prompts, **sampling):
    conversation = Conversation(folder, Sampling(**sampling))
    return ["".join(conversation.answer(prompt)) for prompt in prompts]


def test_equal_seeds_give_equal_answers(run):
    first = answers(run / "final_model", "Some", "more", seed=1)
    assert answers(run / "final_model", "Some", "more", seed=1) == first
    assert answers(run / "final_model", "Some", "more", seed=2) != first


def test_temperature_0_is_the_greedy_answer_of_transformers(run):
    tokenizer = AutoTokenizer.from_pretrained(run / "final_model")
    model = AutoModelForCausalLM.from_pretrained(run / "final_model")
    prompt = tokenizer("Some words", return_tensors="pt")
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0]
    expected = tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answers(run / "final_model", "Some words", temperature=0.0, tokens=8) == [expected]
    # so small a share holds the likeliest token alone
    narrow = answers(run / "final_model", "Some words", temperature=1.0, top_p=1e-6, tokens=8)
    assert narrow == [expected]


def test_the_history_is_read_as_far_as_the_positions_reach(run):
    conversation = Conversation(run / "final_model", Sampling(tokens=4, seed=0))
    said = "".join(conversation.answer("First"))
    tokenizer = conversation._tokenizer
    assert tokenizer.decode(conversation._prompt("Second")[0]) == f"First{said}\nSecond"
    for _ in range(20):
        "".join(conversation.answer("and one more"))
        assert conversation._prompt("Last").shape[1] <= POSITIONS - 4
    long = conversation._prompt("word " * 500)
    assert long.shape == (1, POSITIONS - 4)


def test_a_chat_template_gets_the_turns(final):
    (final / "chat_template.jinja").write_text(TEMPLATE)
    conversation = Conversation(final, Sampling(tokens=4, seed=0))
    said = "".join(conversation.answer("Hi"))
    whole = conversation._tokenizer.decode(conversation._prompt("Bye")[0])
    assert whole == f"[user]Hi[assistant]{said}[user]Bye[assistant]"


def test_text_like_a_special_token_is_text_and_none_begins_a_document(run):
    conversation = Conversation(run / "final_model", Sampling(tokens=4))
    assert 0 not in conversation._prompt("a<|endoftext|>b")[0]
    assert conversation._prompt("").tolist() == [[0]]


def test_an_answer_can_be_ended_and_an_error_is_one_line(run, monkeypatch):
    before = {*threading.enumerate()}
    conversation = Conversation(run / "final_model", Sampling(tokens=20, seed=0))
    answer = conversation.answer("Some")
    first = next(answer)
    answer.close()
    assert {*threading.enumerate()} <= before
    assert conversation._turns == [("Some", first)]

    def fail(*_, **__):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(conversation._model, "generate", fail)
    with pytest.raises(UserError, match=r"^no answer: RuntimeError: out of memory; fewer --tokens"):
        list(conversation.answer("More"))
    assert conversation._turns == [("Some", first)]


def test_a_template_that_refuses_a_turn_is_one_line(final):
    (final / "chat_template.jinja").write_text("{{ raise_exception('no turns') }}")
    conversation = Conversation(final, Sampling(tokens=4))
    with pytest.raises(UserError, match=r"^no answer: TemplateError: no turns"):
        list(conversation.answer("Hi"))


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_without_a_file_is_one_line(run, tmp_path, lost):
    folder = shutil.copytree(run / "final_model", tmp_path / "model")
    (folder / lost).unlink()
    if lost == "model.safetensors":
        torch.save({}, folder / "pytorch_model.bin")  # nothing is unpickled
    with pytest.raises(UserError) as caught:
        Conversation(folder, Sampling())
    assert str(caught.value).startswith(f"{folder}: no ") and "\n" not in str(caught.value)
