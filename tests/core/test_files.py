import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardlab.core import files
from shardlab.core.errors import StorageError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    with pytest.raises(RuntimeError), files.atomic(target) as temporary:
        temporary.write_text("new")
        raise RuntimeError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "result.txt"
    with files.atomic(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_folder_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for content in ("old", "new"):
        with files.atomic(target) as temporary:
            temporary.mkdir()
            (temporary / content).write_text(content)
    assert [p.name for p in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("exchanges", [True, False])
def test_failed_replacement_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    if not exchanges:
        monkeypatch.setattr(files, "_RENAME_EXCHANGE", 1 << 20)  # no file system knows this flag
    with files.atomic(target) as temporary:
        temporary.mkdir()
        (temporary / "new").touch()
    assert [p.name for p in target.iterdir()] == ["new"]
    with pytest.raises(FileNotFoundError), files.atomic(target):
        pass  # nothing was made
    assert [p.name for p in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_sigkill_when_the_old_folder_is_removed_leaves_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    script = (
        "import os, shutil, signal, sys\n"
        "from shardlab.core.files import atomic\n"
        "remove = shutil.rmtree\n"
        "def killed(path, **options):\n"
        "    remove(path, **options)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "shutil.rmtree = killed\n"
        "with atomic(sys.argv[1]) as temporary:\n"
        "    temporary.mkdir()\n"
        "    (temporary / 'new').touch()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(target)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [p.name for p in target.iterdir()] == ["new"]


@pytest.mark.parametrize("old", [None, "old"])
def test_sigkill_in_the_middle_never_shows_half_a_file(tmp_path: Path, old: str | None) -> None:
    target = tmp_path / "result.txt"
    if old is not None:
        target.write_text(old)
    script = (
        "import sys, time\n"
        "from shardlab.core.files import atomic\n"
        "with atomic(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert (target.read_text() if target.exists() else None) == old
    files.write_text(target, "whole")
    assert target.read_text() == "whole"


@given(JSON)
def test_json_round_trips(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    target = tmp_path_factory.mktemp("json") / "value.json"
    files.write_json(target, files.finite(value))
    assert files.read_json(target) == files.finite(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused(tmp_path: Path, number: float) -> None:
    for write in (files.write_json, files.write_json_lines):
        with pytest.raises(ValueError, match="JSON compliant"):
            write(tmp_path / "value.json", [{"loss": number}])
    assert list(tmp_path.iterdir()) == []
    assert files.finite([{"loss": number, "step": 1}]) == [{"loss": None, "step": 1}]


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_keys_changes_neither_hash_nor_file(value: dict[str, int]) -> None:
    turned = dict(reversed(value.items()))
    assert files.sha256_of_value(turned) == files.sha256_of_value(value)


@given(JSON, JSON)
def test_hashes_differ_between_values(one: object, other: object) -> None:
    same = files.sha256_of_value(one) == files.sha256_of_value(other)
    assert not same or one == other


def test_json_lines_round_trip(tmp_path: Path) -> None:
    values = [{"text": "two\nlines"}, [], None, 1.5]
    files.write_json_lines(tmp_path / "values.jsonl", values)
    assert files.read_json_lines(tmp_path / "values.jsonl") == values


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    assert files.sha256_of_file(tmp_path / "abc") == expected


def test_full_disk_is_one_line(tmp_path: Path) -> None:
    """Attack 10 of the review."""
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
