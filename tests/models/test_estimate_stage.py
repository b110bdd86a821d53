"""The stage `estimate` prints the memory of every run, with and without tokens."""

import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig

from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from stages import estimate, prepare, tokenize
from stages.sections import Sections

ROOT = Path(__file__).parents[2]
SLIDE = "strategies.slide={engine: slide}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(ROOT / "params/quick.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, dict[str, str]]:
    """Cells by run and column."""
    estimate.main(Sections(overrides=overrides))
    header, *lines = capsys.readouterr().out.splitlines()
    rows = {}
    for line in lines:
        run, *cells = line.split()
        rows[run] = dict(zip(header.split(), cells, strict=True))
    return rows


def test_memory_is_printed_by_category_and_written_where_there_are_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = printed(capsys, SLIDE)
    assert not (folder / "results").exists()
    prepare.main(Sections())
    tokenize.main(Sections())
    assert printed(capsys, SLIDE) == before
    written = read_json("results/memory.json")
    assert before.keys() == written.keys() == {"fsdp2", "fsdp2-int8", "slide"}
    for run, cells in before.items():
        assert list(cells)[-3:] == ["device", "host", "fits"] and cells["fits"] == "yes"
        total = sum(written[run]["bytes_by_category"].values()) / 1e6
        assert float(cells["device"]) + float(cells["host"]) == pytest.approx(total, abs=0.11)
        parts = sum(float(cells[name]) for name in [*cells][:-3] if cells[name] != "-")
        assert parts == pytest.approx(float(cells["device"]), abs=0.6)
    # its states are in host memory, those of the others on the device
    assert before["fsdp2"]["host"] == "0.0" != before["slide"]["host"]


def test_what_does_not_fit_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "train.batch_size=1000000")
    assert {cells["fits"] for cells in rows.values()} == {"no"}


def test_a_batch_of_all_ranks_needs_the_memory_of_their_parts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = "train.world_size=4"
    parts = printed(capsys, ranks, "train.batch_size=3", "train.accumulation=2")
    assert parts != printed(capsys, ranks, "train.batch_size=4", "train.accumulation=2")
    batch = "train.batch_size=null", "train.global_batch_size=24", "train.accumulation=2"
    assert printed(capsys, ranks, *batch) == parts


def test_a_configuration_needs_no_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2).save_pretrained("llama")
    model = "model={config: llama}", "inputs={llama: llama}"
    assert printed(capsys, *model)["fsdp2"]["fits"] == "yes"
    with pytest.raises(UserError, match=r"in the tokenizer: run shardlab tokenize first"):
        printed(capsys, "tokenize={tokenizer: llama}")
