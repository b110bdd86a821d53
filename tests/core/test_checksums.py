from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.checksums import (
    checksums,
    damage,
    read_checked,
    read_checked_lines,
    refuse_damage_of,
    write_checked,
    write_checked_lines,
)
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, write_json, write_json_lines

FIX = "run python -m stages.it"
OBJECTS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"])).filter(lambda key: key != "checksum"),
    st.none() | st.integers() | st.floats(allow_nan=False) | st.lists(st.booleans()),
)


@given(OBJECTS, st.lists(OBJECTS, min_size=1))
def test_checked_json_round_trips(tmp_path_factory, value, values) -> None:
    folder = tmp_path_factory.mktemp("checked")
    write_checked(folder / "one.json", value)
    write_checked_lines(folder / "more.jsonl", values)
    assert read_checked(folder / "one.json", FIX) == value
    assert read_checked_lines(folder / "more.jsonl", FIX) == values
    assert read_json(folder / "one.json").keys() == {*value, "checksum"}


def refused(path: Path) -> None:
    read = read_checked if path.suffix == ".json" else read_checked_lines
    with pytest.raises(UserError) as caught:
        read(path, FIX)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and message.endswith(FIX) and "\n" not in message


@pytest.mark.parametrize("name", ["one.json", "more.jsonl"])
def test_every_flipped_bit_and_every_cut_is_refused(tmp_path, name) -> None:
    path = tmp_path / name
    values = [{"loss": 1e-05, "name": "é"}, {"loss": 0.30000000000000004}]
    write_checked(path, values[0]) if name == "one.json" else write_checked_lines(path, values)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        refused(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(path)
    path.unlink()
    refused(path)


def test_a_lost_or_moved_line_is_refused(tmp_path) -> None:
    path = tmp_path / "more.jsonl"
    write_checked_lines(path, [{"step": 1}, {"step": 2}, {"step": 3}])
    first, second, last = path.read_text().splitlines(keepends=True)
    for lines in (
        [first, last],
        [second, first, last],
        [first, second],
        [first, second, last, last],
    ):
        path.write_text("".join(lines))
        refused(path)


def test_a_file_of_an_earlier_version_is_named_with_its_command(tmp_path) -> None:
    write_json(tmp_path / "one.json", {"a": 1})
    write_json_lines(tmp_path / "more.jsonl", [{"a": 1}])
    for path in tmp_path.iterdir():
        refused(path)


def test_damaged_files_are_named(tmp_path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a", "deep/b"):
        (tmp_path / name).write_text(name)
    files = checksums(tmp_path)
    assert [*damage(tmp_path, files)] == []
    write_checked(tmp_path / "manifest.json", {"files": files})
    refuse_damage_of(["a", "deep/b"], tmp_path / "manifest.json", FIX)
    (tmp_path / "deep/b").write_text("c")
    refuse_damage_of(["a"], tmp_path / "manifest.json", FIX)
    with pytest.raises(UserError, match=rf"deep/b: damaged: {FIX}"):
        refuse_damage_of(["a", "deep/b"], tmp_path / "manifest.json", FIX)
    (tmp_path / "deep/b").unlink()
    with pytest.raises(UserError, match=rf"deep/b: missing: {FIX}"):
        refuse_damage_of(["deep/b"], tmp_path / "manifest.json", FIX)
    with pytest.raises(UserError, match=rf"manifest.json: has no checksum of c: {FIX}"):
        refuse_damage_of(["c"], tmp_path / "manifest.json", FIX)
