"""A model of this machine in a child process: a small one with random weights, and bad ones."""

import json
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shardlab.core.errors import UserError
from shardlab.search.chat_judge import ChatJudge
from shardlab.search.local_model import LocalModel
from shardlab.search.prompt import Prompt
from shardlab.search.supervision import SupervisedJudge
from tests.families import config_of
from tests.search.chat_server import question

PROMPT = Prompt("Be brief.", "Hello?", ("a", "b"))
TEMPLATE = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of random weights, and a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("models") / "small"
    bytes_ = Tokenizer(models.BPE({each: n for n, each in enumerate(letters())}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    config = config_of("llama-tied", vocab_size=256, max_position_embeddings=1024)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def letters() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "generate" in " ".join(each.cmdline())]


@pytest.mark.long
def test_answers_are_bounded_and_depend_on_the_prompt_alone(folder):
    model = LocalModel(str(folder))
    first, again = model.ask(PROMPT), model.ask(PROMPT)
    assert first == again != ""
    assert len(first) <= 400
    long = Prompt("", "word " * 1000, ())
    with pytest.raises(UserError, match=r"a prompt of \d+ tokens and 400 of an answer are more "):
        model.ask(long)
    kept = model.conversation([(PROMPT, first)])
    assert (kept.model, kept.endpoint, kept.dialect) == (str(folder), None, None)
    assert len(children()) == 1
    del model
    assert children() == []


@pytest.mark.long
def test_damaged_weights_are_one_line_and_rules_choose(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no tensors at all")
    verdict = SupervisedJudge(ChatJudge(LocalModel(str(tmp_path)))).choose(question())
    assert verdict.judge == "rules"
    assert verdict.reason.startswith(f"local: {tmp_path} gave no answer (agent.model: ")
    assert "\n" not in verdict.reason


def test_a_late_model_is_killed(folder):
    model = LocalModel(str(folder), timeout_s=0.05)
    with pytest.raises(UserError, match=r"none within 0.05 s: give"):
        model.ask(PROMPT)
    assert children() == []


@pytest.mark.parametrize(
    ("files", "trouble"),
    [
        ([], "no config.json in it"),
        (["config.json", "pytorch_model.bin"], "nothing is unpickled: convert it"),
        (None, "no such folder or file"),
    ],
)
def test_what_is_no_model_is_refused_before_a_process_starts(tmp_path, files, trouble):
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
    for name in files or []:
        (path / name).write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match=trouble) as error:
        LocalModel(str(path)).ask(PROMPT)
    assert "\n" not in str(error.value)
    assert children() == []


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(UserError, match=r"neither a folder nor a \.gguf file"):
        LocalModel(str(path)).ask(PROMPT)
