"""The quality of any model on any text is that of transformers, and of the pipeline."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from shardlab import cli
from shardlab.core.errors import UserError
from shardlab.data.corpus_file import read_corpus
from shardlab.data.settings import Data
from shardlab.data.tokenize import is_validation
from shardlab.data.tokenizer import number_tokenizer
from shardlab.data.tokens import open_split
from shardlab.train.evaluation import evaluate, load_model
from shardlab.train.text_quality import Windows, text_quality
from tests.saved_model_factory import write_saved_model
from tests.token_data import make_token_data

POSITIONS = 80
TEXTS = ["Gama solu. <|endoftext|> is text here.", "Zulo vutozila gona, bi.", "Bi \u65e5."]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved model, not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    write_saved_model(folder, POSITIONS)
    return folder / "final_model"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def quality(model, text, tmp_path, **windows):
    data = Data(source="jsonl", path=str(text))
    return text_quality(str(model), data, Windows(**windows), tmp_path / "work")


def refusal(model, text, tmp_path, **windows):
    with pytest.raises(UserError) as caught:
        quality(model, text, tmp_path, **windows)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("length, batch", [(7, 3), (79, 8)])
def test_it_is_the_loss_of_transformers_on_the_same_tokens(model, text, tmp_path, length, batch):
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = []
    for document in TEXTS:
        encoded = tokenizer(document, split_special_tokens=True)["input_ids"]
        ids += [*encoded, tokenizer.eos_token_id]
    theirs = AutoModelForCausalLM.from_pretrained(model)
    windows = [torch.tensor([ids[i : i + length + 1]]) for i in range(0, len(ids) - 1, length)]
    with torch.no_grad():
        nats = sum(theirs(w, labels=w).loss.item() * (w.numel() - 1) for w in windows)
    size = sum(len(document.encode()) for document in TEXTS)
    measured = quality(model, text, tmp_path, length=length, batch=batch)
    assert (measured.tokens, measured.bytes, measured.documents) == (len(ids) - 1, size, 3)
    assert measured.loss == pytest.approx(nats / (len(ids) - 1), rel=1e-6)
    assert measured.perplexity == pytest.approx(math.exp(measured.loss))
    assert measured.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert measured.parameters == theirs.num_parameters()


def test_of_the_validation_split_it_is_what_the_pipeline_measures(model, tmp_path):
    data = make_token_data(tmp_path)
    folder = shutil.copytree(model, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / name, folder)
    documents = [d for d in read_corpus(data / "corpus.json") if is_validation(d.split_key, 0.1)]
    path = tmp_path / "validation.jsonl"
    path.write_text("".join(json.dumps(d._asdict()) + "\n" for d in documents))
    measured = quality(folder, path, tmp_path, length=64)
    split = open_split(data / "tokens", "validation")
    expected = evaluate(load_model(folder), split, 64, 8)
    assert (measured.loss, measured.tokens) == (expected.loss, expected.tokens)
    assert measured.bits_per_byte == expected.bits_per_byte is not None


def test_a_sequence_is_as_long_as_the_positions_and_at_most_1024(model, text, tmp_path):
    assert quality(model, text, tmp_path).length == POSITIONS
    folder = shutil.copytree(model, tmp_path / "longer")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 300}
    GPT2LMHeadModel(GPT2Config(**sizes, n_positions=2000)).save_pretrained(folder)
    assert quality(folder, text, tmp_path).length == 1024


def test_the_command_takes_a_run_and_a_text_by_its_name(model, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "results/train/a/seed0/final_model")
    cli.main(["evaluate", "a", "--data", str(text), "--json"])
    measured = json.loads(capsys.readouterr().out)
    assert measured == quality("results/train/a/seed0/final_model", text, tmp_path).model_dump()
    (tmp_path / "renamed").write_text(text.read_text())
    cli.main(["evaluate", str(model), "--data", "{source: jsonl, path: renamed}", "--length", "9"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{model}: {measured['parameters']:,} parameters"
    assert lines[1].endswith("3 documents, 68 bytes, 53 tokens to predict, in sequences of 9")
    assert lines[2].startswith("loss 6.") and lines[2].endswith(" bits per byte")


def test_a_text_that_a_tokenizer_loses_has_no_bits_per_byte(model, text, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    measured = quality(folder, text, tmp_path)
    assert (measured.bits_per_byte, measured.altered) == (None, 3)


def test_mistakes_are_one_line_with_a_fix(model, text, tmp_path, capsys):
    missing = tmp_path / "none"
    assert refusal(missing, text, tmp_path).startswith(f"{missing}: no model: no such folder")
    (tmp_path / "empty").mkdir()
    assert "there is no" in refusal(tmp_path / "empty", text, tmp_path)
    long = refusal(model, text, tmp_path, length=POSITIONS + 1)
    assert long == f"--length 81: {model} has 80 positions: give at most those"
    assert "no such file" in refusal(model, missing, tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["evaluate", str(model), "--data", ""])
    assert capsys.readouterr().err.startswith("evaluate: error: --data.path: string should have")
    (tmp_path / "void.jsonl").write_text("")
    assert "no text in it" in refusal(model, tmp_path / "void.jsonl", tmp_path)

    folder = shutil.copytree(model, tmp_path / "without")
    (folder / "tokenizer.json").unlink()
    assert f"{folder}: no tokenizer: there is no" in refusal(folder, text, tmp_path)
    number_tokenizer(300, 0).save(folder)
    assert "whose tokenizer nobody named" in refusal(folder, text, tmp_path)


def test_a_tokenizer_of_another_model_is_one_line(model, text, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=100)).save_pretrained(folder)
    assert "and the model 100 of them: its tokenizer.json is of another" in refusal(
        folder, text, tmp_path
    )


def test_a_model_that_lacks_weights_is_refused(model, text, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_layer": config["n_layer"] + 1}))
    assert "no weights for transformer.h.2." in refusal(folder, text, tmp_path)
