"""Raw records of JSON files and Hugging Face datasets, and their conversion to documents."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ijson

from shardlab.core.errors import UserError
from shardlab.data.corpus.corpus_file import Document

_NAMED = 100


class Tally:
    """Counter of records that are no documents; refuses the first of them if asked to.

    Args:
        policy: `refuse` or `skip` (`data.bad_records`).
        where: name of the source, for messages.
    """

    def __init__(self, policy: str, where: str) -> None:
        self._policy = policy
        self._where = where
        self._kinds: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._named: list[str] = []

    def bad(self, position: str, kind: str) -> None:
        """Record a bad record, for example at `record 7` of kind `no title`.

        Raises:
            UserError: when bad records are refused.
        """
        if self._policy == "refuse":
            raise UserError(
                f"{self._where}: {position}: {kind}; fix it, or set data.bad_records to skip"
            )
        self._kinds[kind] += 1
        if len(self._named) < _NAMED:
            self._named.append(f"{position}: {kind}")

    def leave_out(self, kind: str) -> None:
        """Count a good record that the source leaves out on purpose."""
        self._left_out[kind] += 1

    def as_json(self) -> dict[str, Any]:
        """Return `bad_records` and `left_out`: counts by kind, and the first 100 bad ones by
        position."""
        return {
            "bad_records": {
                "count": self._kinds.total(),
                "kinds": dict(self._kinds),
                "first": self._named,
            },
            "left_out": dict(self._left_out),
        }


def to_documents(records: Iterable[tuple[str, int, Any]], tally: Tally) -> Iterator[Document]:
    """Yield the documents of raw records.

    Args:
        records: position for messages, number from 1, and a value that should be a mapping with
            `title` and `text` (both non-empty text) and may have an `id` (text or whole number;
            the record's number stands in for an absent one).
    """
    for position, number, value in records:
        kind = _complaint(value)
        if kind is None:
            identity = value.get("id")
            yield Document(
                str(number if identity is None else identity), value["title"], value["text"]
            )
        else:
            tally.bad(position, kind)


def _complaint(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "not an object"
    for key in ("title", "text"):
        if value.get(key) is None:
            return f"no {key}"
        if not isinstance(value[key], str):
            return f"{key} is not text"
        if not value[key].strip():
            return f"empty {key}"
    if isinstance(value.get("id"), bool) or not isinstance(value.get("id"), str | int | None):
        return "id is neither text nor a whole number"
    try:
        f"{value.get('id')}{value['title']}{value['text']}".encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair in the text"
    return None


# the pure-Python parser is 27 times slower, and ijson would fall back on it silently
_PARSER = ijson.get_backend("yajl2_c")
_CHUNK = 1 << 16


def read_json_array(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield position, number from 1 and value of each record.

    The parser replaces half a surrogate pair (`\\ud800` alone) by `?`.

    Raises:
        UserError: a syntax error or an early end, with its byte offset and record number; the
            records before it have been passed on, so the caller commits only at the end.
    """
    with path.open("rb") as file:
        _expect_array(path, file)
        number = 0
        values = ijson.sendable_list()
        parser = _PARSER.items_coro(values, "item", use_float=True)
        while True:
            start = file.tell()
            chunk = file.read(_CHUNK)
            try:
                parser.send(chunk) if chunk else parser.close()
            except ijson.JSONError as error:
                raise _syntax_error(path, start, number + len(values) + 1, error) from None
            for value in values:
                number += 1
                yield f"record {number}", number, value
            del values[:]
            if not chunk:
                return


def _expect_array(path: Path, file: BinaryIO) -> None:
    first = file.read(_CHUNK).lstrip()[:1]
    file.seek(0)
    if first and first != b"[":
        raise UserError(
            f"{path}: byte 0, record 1: expected a JSON array, found {first!r}; "
            "for one object per line set data.source to jsonl"
        )


def _syntax_error(path: Path, start: int, number: int, error: Exception) -> UserError:
    offset = _offset(path, start)
    size = path.stat().st_size
    if offset >= size:
        reason = "the file ends in the middle (truncated?)"
    else:
        reason = str(error).removeprefix("b'").replace("\\n", "\n").partition("\n")[0]
    return UserError(
        f"{path}: byte {offset}, record {number}: {reason}; fix the file or fetch it again"
    )


def _offset(path: Path, start: int) -> int:
    """Find the byte at which parsing fails by feeding the last chunk bytewise."""
    parser = _PARSER.basic_parse_coro(ijson.sendable_list(), use_float=True)
    with path.open("rb") as file:
        for _ in range(start // _CHUNK):
            parser.send(file.read(_CHUNK))
        for offset, byte in enumerate(file.read(_CHUNK), start):
            try:
                parser.send(bytes([byte]))
            except ijson.JSONError:
                return offset
        return file.tell()


def read_json_lines(path: Path, tally: Tally) -> Iterator[tuple[str, int, Any]]:
    """Yield position, line number from 1 and value; empty lines are skipped.

    A line that is not JSON is a bad record, named with the byte offset of the error.
    """
    offset = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    value = json.loads(line)
                except UnicodeDecodeError as error:
                    tally.bad(f"line {number}, byte {offset + error.start}", "not UTF-8")
                except json.JSONDecodeError as error:
                    place = offset + len(error.doc[: error.pos].encode())
                    tally.bad(f"line {number}, byte {place}", "not JSON")
                except RecursionError:
                    tally.bad(f"line {number}, byte {offset}", "nested too deeply")
                else:
                    yield f"line {number}", number, value
            offset += len(line)


_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def read_huggingface(path: str) -> Iterator[tuple[str, int, Any]]:
    """Yield position, number from 1 and row of the training split.

    Args:
        path: a .parquet, .json or .jsonl file; a folder of such files or one that `save_to_disk`
            wrote; else a dataset's name on the hub, with its configuration after a colon
            (`wikimedia/wikipedia:20231101.simple`).

    Raises:
        UserError: the `datasets` package is missing, or cannot load or read the dataset.
    """
    if Path(path).exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a local read must not ask the network
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.source huggingface needs the datasets package: pip install 'shardlab[datasets]'"
        ) from None
    try:
        rows = _load(datasets, path)
        _expect_columns(path, rows)
        for number, row in enumerate(rows, start=1):
            yield f"record {number}", number, row
    except UserError:
        raise
    except Exception as error:  # the readers of datasets have no common error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"data.path {path!r}: cannot read it as a Hugging Face dataset ({reason}); "
            "check the path or name, and the network for a name"
        ) from None


def _load(datasets: Any, path: str) -> Any:
    place = Path(path)
    if place.is_file():
        kind = _FORMATS.get(place.suffix)
        if kind is None:
            raise UserError(f"data.path {path!r}: expected one of {', '.join(sorted(_FORMATS))}")
        return datasets.load_dataset(kind, data_files=path, split="train", streaming=True)
    if (place / "state.json").is_file():
        return datasets.load_from_disk(path)
    if (place / "dataset_dict.json").is_file():
        return datasets.load_from_disk(path)["train"]
    name, _, configuration = (path, "", "") if place.is_dir() else path.partition(":")
    return datasets.load_dataset(name, configuration or None, split="train", streaming=True)


def _expect_columns(path: str, rows: Any) -> None:
    columns = rows.column_names
    missing = [key for key in ("title", "text") if columns is not None and key not in columns]
    if missing:
        raise UserError(
            f"data.path {path!r}: no column {missing[0]!r} (it has {', '.join(columns)}); "
            "rename a column of it to that"
        )
