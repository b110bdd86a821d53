"""Experiments that `shardlab init` writes: what is refused, and what a second call leaves alone."""

import gzip
import shutil
from pathlib import Path

import pytest

from shardlab.config.parameters import Parameters
from stages.folder import FILES
from tests.commands import typed
from tests.pipeline.workspace import ROOT


def init(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and last line of the command, in a process whose CPU time begins with it."""
    place = folder.parent / f"{folder.name}-command-{len([*folder.parent.iterdir()])}"
    command = typed(place, folder, "shardlab", "init", *arguments)
    code = command.wait()
    return code, command.said().splitlines()[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a text, and with what is none."""
    (tmp_path / "here/tokens").mkdir(parents=True)
    (tmp_path / "here/tokens/train.bin").write_bytes(bytes([0, 200] * 8))
    (tmp_path / "here/book.txt").write_text("one\n\ntwo")
    return tmp_path / "here"


def test_an_experiment_is_complete_and_stays(folder: Path) -> None:
    options = ["--text", "book.txt", "--minutes", "60", "--world-size", "4", "--link", "1gbit"]
    code, said = init(folder, "mine", *options)
    assert code == 0, said
    mine = folder / "mine"
    values = Parameters(mine / "params.yaml").complete()
    assert values.data.path == values.inputs["text"] == str(folder / "book.txt")
    assert values.data.separator == "\n\n"
    assert values.data.validation_share == 0.5  # at 0.02 nothing were left to validate
    assert {timing.world_size for timing in values.timings.values()} == {4}
    assert values.agent.link is not None and values.agent.link.rate == "1gbit"
    assert all((mine / name).exists() for name in (*FILES, ".git"))
    text = (mine / "params.yaml").read_text()
    # as in a clone
    (mine / "stages").unlink()
    (mine / "Snakefile").write_text("of an older version")
    code, said = init(folder, "mine")
    assert code == 0, said
    assert (mine / "Snakefile").read_text() == (ROOT / "Snakefile").read_text()
    assert (mine / "stages").samefile(ROOT / "stages")
    assert (mine / "params.yaml").read_text() == text
    ignored = (mine / ".gitignore").read_text().splitlines()
    assert [line for line in ignored if line in ("/csrc", "/shardlab", "/stages")] == ignored[-3:]


@pytest.mark.parametrize("name, size", [("books.txt", 10_000), ("books.txt.gz", 100)])
def test_documents_are_those_of_the_whole_text(folder: Path, name: str, size: int) -> None:
    """600, of which the first MB has a sixth, or all, packed."""
    text = b"<|endoftext|>".join([b"a" * size] * 600)
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    code, said = init(folder, "mine", "--text", name, "--minutes", "60")
    assert code == 0, said
    values = Parameters(folder / "mine/params.yaml").complete()
    assert (values.data.separator, values.data.validation_share) == (None, 0.02)


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["mine", "--text", "bok.txt"], "--text bok.txt: no such file or folder; give one, or wi"),
        (["mine", "--text", "tokens"], "data.path 'FOLDER/tokens': a folder without .txt or .md"),
        (["mine", "--text", "tokens/train.bin"], "--text tokens/train.bin: no documents; bad rec"),
        (["mine", "--model", "tinny"], "--model.preset: "),
        (["mine", "--world-size", "1"], "--world-size: input should be greater than or equal to 2"),
        (["mine", "--link", "100"], "--link.rate: link rate '100': write a number and its unit"),
        # takes many times the minute, on the fastest of cores, too
        pytest.param(
            ["mine", "--model", "8x576", "--minutes", "1"],
            "--minutes 1: 8 runs of 8x576 with steps of ",
            marks=pytest.mark.long,
        ),
        (["."], "FOLDER: not empty, and no experiment: name a new folder"),
        (["taken"], "FOLDER/taken: a folder of the repository of shardlab: name another one"),
        (["taken", "--ranks", "2"], "FOLDER/taken/params.yaml is there already: change that file"),
    ],
)
def test_mistakes_write_nothing(folder: Path, arguments: list[str], error: str) -> None:
    taken = folder / "taken"
    (taken / "shardlab").mkdir(parents=True)
    shutil.copy(ROOT / "params/quick.yaml", taken / "params.yaml")
    code, said = init(folder, *arguments)
    assert code == 2
    assert said.startswith(f"init: error: {error.replace('FOLDER', str(folder))}")
    assert not (folder / "mine").exists()
    assert {path.name for path in taken.iterdir()} == {"shardlab", "params.yaml"}
