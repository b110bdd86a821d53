"""Files and folders outside of the experiment: compared by content, refused where no input."""

import os
from pathlib import Path

import pytest

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from stages.content import content
from stages.outside import inputs_of_stages
from stages.plans import plans
from tests.pipeline.graphs import pending
from tests.pipeline.workspace import ROOT, copy_project, run, set_params


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text/part").mkdir(parents=True)
    (tmp_path / "text/a.txt").write_text("one")
    (tmp_path / "text/part/b.txt").write_text("three")
    return tmp_path / "text"


def test_content_is_of_names_and_bytes_and_not_of_times(folder: Path) -> None:
    before = content("text")
    assert (before.files, before.bytes) == (2, 8)
    os.utime(folder / "a.txt", (1, 1))
    after = content("text", before)
    assert after.sha256 == before.sha256 and after.seen != before.seen
    (folder / "a.txt").rename(folder / "c.txt")
    renamed = content("text")
    (folder / "c.txt").write_text("two")
    assert len({each.sha256 for each in (before, renamed, content("text"))}) == 3


def test_a_file_is_read_again_only_after_a_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content("text/a.txt")

    def unexpected(path: Path) -> str:
        raise AssertionError(path)

    monkeypatch.setattr("stages.content.sha256_of_file", unexpected)
    assert content("text/a.txt", before) is before
    (folder / "a.txt").write_text("other")
    with pytest.raises(AssertionError):
        content("text/a.txt", before)


@pytest.mark.parametrize(("path", "message"), [("no", "no: no such file"), (".", ".: an empty f")])
def test_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{message}"):
        content(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data", "{source: text, path: PATH}"),
        ("tokenize", "{tokenizer: PATH}"),
        ("model", "{pretrained: PATH}"),
        ("model", "{config: PATH}"),
    ],
)
def test_paths_that_no_input_holds_are_refused(folder: Path, key: str, value: str) -> None:
    def check(path: str, **inputs: str) -> None:
        given = [f"{key}={value.replace('PATH', path)}", f"inputs={inputs}"]
        plans(Parameters(ROOT / "params.yaml", given))

    check("text/part", mine="text")
    (folder.parent / "train").mkdir()  # a word for a tokenizer, and no path
    check("organisation/name-on-the-hub")
    with pytest.raises(UserError, match=rf"^{key}\.\w+: text/part is none of inputs, "):
        check("text/part", mine="text/a.txt")


def test_stages_depend_on_the_inputs_that_they_read(folder: Path) -> None:
    given = [
        "inputs={text: text, part: text/part, answers: text/a.txt}",
        "data={source: text, path: text/a.txt}",
        "model={config: text/part}",
    ]
    read = inputs_of_stages(Parameters(ROOT / "params.yaml", given))
    of_model = {stage: ["part"] for stage in ("train", "timing", "estimate", "propose", "trial")}
    assert read == {"prepare": ["answers"], "tokenize": [], **of_model}


@pytest.mark.long
def test_a_changed_text_repeats_what_reads_it_in_both_tools(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    text = tmp_path / "mine.txt"
    text.write_text("one <|endoftext|> two <|endoftext|> three")
    set_params(root, data={"source": "text", "path": str(text)}, inputs={"mine": str(text)})
    run(root, "dvc", "repro", "prepare", "inputs")
    made = ["data/corpus.json", "data/inputs/prepare.json"]
    run(root, "snakemake", "--touch", "-F", "--cores", "1", *made)
    stages = {"content mine", "inputs", "prepare"}
    os.utime(text, (1, 1))
    assert pending(root).isdisjoint(stages)
    assert "content@mine" not in run(root, "dvc", "status", "content", "prepare").stdout
    text.write_text("other <|endoftext|> documents")
    assert pending(root) >= stages
    assert "content@mine" in run(root, "dvc", "status", "content", "prepare").stdout
    run(root, "dvc", "repro", "prepare")
    assert "other" in (root / "data/corpus.json").read_text()
    text.unlink()
    done = run(root, "snakemake", "--cores", "1", "data/corpus.json", check=False)
    assert done.returncode != 0 and f"inputs.mine: {text}: no such file" in done.stdout
