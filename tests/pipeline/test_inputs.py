"""Files and folders outside of the experiment: compared by content, refused where no input."""

import os
from pathlib import Path

import pytest

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from stages.inputs import content_of, main
from stages.params import read_contents
from stages.sections import Sections
from tests.pipeline.graphs import pending
from tests.pipeline.workspace import ROOT, copy_project, run, set_params


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text/part").mkdir(parents=True)
    (tmp_path / "text/a.txt").write_text("one")
    (tmp_path / "text/part/b.txt").write_text("three")
    return tmp_path / "text"


MINE = {"mine": "text"}


def test_content_is_of_names_and_bytes_and_not_of_times(folder: Path) -> None:
    main(Sections(ROOT / "params.yaml", [f"inputs={MINE}"]), "mine")
    before = content_of(MINE, "mine")
    os.utime(folder / "a.txt", (1, 1))
    assert content_of(MINE, "mine").sha256 == before.sha256
    (folder / "a.txt").rename(folder / "c.txt")
    renamed = content_of(MINE, "mine")
    (folder / "c.txt").write_text("two")
    assert len({content.sha256 for content in (before, renamed, content_of(MINE, "mine"))}) == 3


@pytest.mark.parametrize(("path", "message"), [("no", "no: no such file"), (".", ".: an empty f")])
def test_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^inputs.mine: {message}"):
        content_of({"mine": path}, "mine")


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("data", "{source: text, path: PATH}", "corpus"),
        ("tokenize", "{tokenizer: PATH}", "tokenizer"),
        ("model", "{pretrained: PATH}", "model"),
        ("model", "{config: PATH}", "model"),
    ],
)
def test_paths_that_no_input_holds_are_refused(
    folder: Path, key: str, value: str, name: str
) -> None:
    def contents(path: str, **inputs: str) -> dict[str, str | None]:
        overrides = [f"inputs={inputs}", "tokenize={}", f"{key}={value.replace('PATH', path)}"]
        return read_contents(Parameters(ROOT / "params.yaml", overrides).complete())

    # the nearest input, and no other parameter
    found = contents("text/part", mine="text", near="text/part")
    near = content_of({"near": "text/part"}, "near").sha256
    assert {key for key, sha256 in found.items() if sha256 == near} >= {name}
    assert contents("organisation/name-on-the-hub")[name] is None
    with pytest.raises(UserError, match=rf"^{key}\.\w+: text/part is none of inputs, "):
        contents("text/part", mine="text/a.txt")


@pytest.mark.long
def test_a_changed_text_repeats_what_reads_it_in_both_tools(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    text = tmp_path / "mine.txt"
    text.write_text("one <|endoftext|> two <|endoftext|> three")
    set_params(root, data={"source": "text", "path": str(text)}, inputs={"mine": str(text)})
    run(root, "dvc", "repro", "prepare")
    made = ["data/corpus.json", "data/params.yaml"]
    run(root, "snakemake", "--touch", "-F", "--cores", "1", *made)
    stages = {"inputs mine", "params", "prepare"}
    os.utime(text, (1, 1))
    assert pending(root).isdisjoint(stages)
    assert "inputs@mine" not in run(root, "dvc", "status", "prepare").stdout
    text.write_text("other <|endoftext|> documents")
    assert pending(root) >= stages
    run(root, "dvc", "repro", "prepare")
    assert "other" in (root / "data/corpus.json").read_text()
    text.unlink()
    done = run(root, "snakemake", "--cores", "1", "data/corpus.json", check=False)
    assert done.returncode != 0 and f"data.path '{text}': no such file" in done.stdout
