"""Atomic writes, JSON, hashes, and what killed processes leave."""

import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardlab.core import files
from shardlab.core.errors import StorageError, UserError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
WRITER = """
import sys, time
from shardlab.core.files import atomic
with atomic(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def writer(path: Path) -> subprocess.Popen[str]:
    """Return a process that is writing a file."""
    command = [sys.executable, "-c", WRITER, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


def test_a_file_is_replaced_when_the_block_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "result.txt"
    files.write_text(target, "old")
    with pytest.raises(RuntimeError), files.atomic(target) as temporary:
        temporary.write_text("new")
        raise RuntimeError
    with files.atomic(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_mode_of_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        with files.atomic(tmp_path / "one") as temporary:
            save_file({}, temporary)
        with files.atomic(tmp_path / "folder") as temporary:
            (temporary / "inner").mkdir(parents=True)
            save_file({}, temporary / "inner/file")
        files.write_text(tmp_path / "text", "a")
    finally:
        os.umask(before)
    names = ["one", "folder/inner/file", "text"]
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names] == [mode] * 3
    folders = ["folder", "folder/inner"]
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in folders} == {0o777 & ~mask}


def test_folder_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for content in ("old", "new"):
        with files.atomic(target) as temporary:
            temporary.mkdir()
            (temporary / content).write_text(content)
    with pytest.raises(FileNotFoundError), files.atomic(target):
        pass  # nothing was made
    assert [p.name for p in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_killed_writer_leaves_the_old_file_and_what_the_next_one_removes(tmp_path: Path) -> None:
    target = tmp_path / "corpus.json"
    target.write_text("old")
    with writer(target) as process:
        process.kill()
    assert target.read_text() == "old"
    assert list(tmp_path.glob(".corpus.json.*"))
    files.write_text(target, "whole")
    assert target.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


@given(JSON)
def test_json_round_trips(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    target = tmp_path_factory.mktemp("json") / "value.json"
    files.write_json(target, files.finite(value))
    assert files.read_json(target) == files.finite(value)
    files.write_json_lines(target, [files.finite(value), None])
    assert files.read_json_lines(target) == [files.finite(value), None]
    if isinstance(value, dict):
        turned = dict(reversed(value.items()))
        assert files.sha256_of_value(turned) == files.sha256_of_value(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused(tmp_path: Path, number: float) -> None:
    for write in (files.write_json, files.write_json_lines):
        with pytest.raises(ValueError, match="JSON compliant"):
            write(tmp_path / "value.json", [{"loss": number}])
    assert list(tmp_path.iterdir()) == []
    assert files.finite([{"loss": number, "step": 1}]) == [{"loss": None, "step": 1}]


@pytest.mark.parametrize("read", [files.read_json, files.read_json_lines])
@pytest.mark.parametrize(
    ("content", "kind"), [(None, "no such file"), (b'{"loss": 1', "damaged"), (b"\xff", "damaged")]
)
def test_a_damaged_json_file_is_one_line_with_the_fix(tmp_path, read, content, kind) -> None:
    path = tmp_path / "values"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path, "run shardlab it")
    message = str(error.value)
    assert message.startswith(str(path)) and f": {kind}" in message and "\n" not in message
    assert message.endswith(": run shardlab it")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a", "deep/b"):
        (tmp_path / name).write_text(name)
    expected = files.sha256_of_files(tmp_path)
    assert files.find_damage(tmp_path, expected) is None
    (tmp_path / "deep/b").write_text("c")
    assert files.find_damage(tmp_path, expected) == ("deep/b", "damaged")
    assert files.find_damage(tmp_path, expected, slice(0, None, 2)) is None
    (tmp_path / "deep/b").unlink()
    with pytest.raises(UserError, match=r"deep/b: missing: build it"):
        files.refuse_damage(tmp_path, expected, "build it")


def test_full_disk_is_one_line(tmp_path: Path) -> None:
    target = tmp_path / "result"
    with pytest.raises(StorageError) as error, files.atomic(target) as temporary:
        temporary.symlink_to("/dev/full")
        temporary.write_text("new")
    message = str(error.value)
    assert message.startswith(f"{target}: cannot be written (") and "\n" not in message
    assert message.endswith("): free space, and run it again")
    assert [*tmp_path.iterdir()] == []


def test_file_in_the_way_of_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    for path in ("results/one", "results/one/two"):
        with pytest.raises(StorageError, match="remove what is in its way"):
            files.write_text(tmp_path / path, "new")
    # a library in Rust, whose errors are no OSError
    with pytest.raises(StorageError, match="Not a directory"), files.writing(tmp_path):
        save_file({}, tmp_path / "results/one")
