"""Messages of the weekly job on results that were made again."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardlab.core.files import write_json_lines
from tests.pipeline.workspace import ROOT
from tests.record_factory import make_records

Change = Callable[[dict[str, Any]], object]
ELSEWHERE: Change = lambda record: record["host"].update(cpu="Another processor")  # noqa: E731
OTHER_KERNELS: Change = lambda record: record.update(kernels="kernels_v3.so (AVX2), csrc 0")  # noqa: E731


def compared(folder: Path, *changes: Change, runs: tuple[str, ...] = ("fsdp2",)) -> tuple[int, str]:
    """Exit code and words of the comparison with a copy whose first record is changed."""
    old = [record.model_dump(mode="json") for record in make_records(["fsdp2"])]
    new = [record.model_dump(mode="json") for record in make_records([*runs])]
    for change in changes:
        change(new[0])
    write_json_lines(folder / "old.jsonl", old)
    write_json_lines(folder / "new.jsonl", new)
    command = [sys.executable, ROOT / ".ci/compare_results.py", "old.jsonl", "new.jsonl"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout


def add(name: str, value: float) -> Change:
    return lambda record: record.update({name: record[name] + value})


def test_equal_results_repeat(tmp_path: Path) -> None:
    assert compared(tmp_path) == (0, "bytes and losses repeat\n")


@pytest.mark.parametrize("name", ["bytes_wire", "index_bytes"])
def test_another_byte_differs_on_any_processor(name: str, tmp_path: Path) -> None:
    for changes in ([], [ELSEWHERE]):
        code, said = compared(tmp_path, add(name, 1.0), *changes)
        assert code == 1 and said.startswith(f"fsdp2, seed 0: {name} ")


@pytest.mark.parametrize("name", ["train_loss", "val_loss"])
def test_a_loss_repeats_on_its_processor_and_is_near_on_others(name: str, tmp_path: Path) -> None:
    """The losses of the seeds are thousandths apart."""
    code, said = compared(tmp_path, add(name, 1e-12))
    assert code == 1 and said.startswith(f"fsdp2, seed 0: {name} ")
    for elsewhere in (ELSEWHERE, OTHER_KERNELS):
        assert compared(tmp_path, add(name, 1e-4), elsewhere)[0] == 0
        assert compared(tmp_path, add(name, 0.1), elsewhere)[0] == 1
    rebuilt: Change = lambda record: record.update(kernels=f"{record['kernels']}4")  # noqa: E731
    assert compared(tmp_path, add(name, 1e-4), rebuilt)[0] == 1


def test_runs_that_are_missing_new_diverged_or_crashed_differ(tmp_path: Path) -> None:
    assert "ddp, seed 2: only made" in compared(tmp_path, runs=("fsdp2", "ddp"))[1]
    assert "fsdp2, seed 1: only committed" in compared(tmp_path, runs=("ddp",))[1]
    lost: Change = lambda record: record.update(val_loss=None)  # noqa: E731
    assert "val_loss None" in compared(tmp_path, lost, ELSEWHERE)[1]
    crash: Change = lambda record: record.update(crashed="rank 1: killed")  # noqa: E731
    assert compared(tmp_path, crash) == (1, "fsdp2, seed 0: crashed: rank 1: killed\n")
