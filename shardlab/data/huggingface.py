"""Rows of Hugging Face datasets: files on this machine, and datasets of the hub."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlab.config.model_and_data import Data
from shardlab.core.errors import UserError
from shardlab.data.local_files import PACKED, read_json
from shardlab.data.source_records import FIELDS, Fields, Tally

_ENDINGS = (".parquet", ".json", ".jsonl")
_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""one of them is in a folder that `save_to_disk` wrote"""
_ROWS = 100
"""decoded at once"""
_MISSING = "data.source huggingface needs the datasets package: pip install 'shardlab[datasets]'"
_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def read_huggingface(data: Data, tally: Tally, fields: Fields) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id and row of a split.

    Parquet and JSON on this machine are read in bounded memory; of the hub, a row group at a time.
    An id is the number of the row; after the name of its file, if that is in a folder.

    Args:
        data: its path is a .parquet, .json or .jsonl file, the last two packed or not; a folder of
            such files or one that `save_to_disk` wrote; else a dataset's name on the hub, with its
            configuration after a colon (`wikimedia/wikipedia:20231101.simple`).

    Raises:
        UserError: the `datasets` package is missing, or cannot load or read the dataset.
    """
    path = str(data.path)
    local, split = Path(path), data.split or "train"
    if local.is_file():
        yield from _read_file(local, tally, fields)
        return
    if local.exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a local read must not ask the network
    elif not _ON_HUB.fullmatch(path) or path.endswith((*_ENDINGS, *PACKED)):
        raise UserError(f"data.path {path!r}: no such file or folder, and no name on the hub")
    try:
        import datasets
    except ImportError:
        raise UserError(_MISSING) from None
    try:
        if files := _files(datasets, local, split):
            for file in files:
                name = os.path.relpath(file, local)  # it may be a link out of the folder
                for position, identity, row in _read_file(file, tally.inside(name), fields):
                    yield f"{name}: {position}", f"{name}:{identity}", row
            return
        rows = _load(datasets, path, split, data.streaming)
        if rows.column_names is not None:
            _expect_columns(f"data.path {path!r}", rows.column_names, fields)
        for number, row in enumerate(rows, start=1):
            yield f"record {number}", str(number), row
    except UserError:
        raise
    except Exception as error:  # the readers of datasets have no common error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"data.path {path!r}: {_fix(local, reason)}") from None


def _read_file(path: Path, tally: Tally, fields: Fields) -> Iterator[tuple[str, str, Any]]:
    if path.suffix == ".parquet":
        yield from read_parquet(path, fields)
    elif _is_json(path):
        yield from read_json(path, tally)
    else:
        packed = "/".join(ending.removeprefix(".") for ending in PACKED)
        raise UserError(
            f"{path}: expected one of {', '.join(_ENDINGS)} (JSON also packed: {packed}); "
            "for plain text set data.source to text"
        )


def _is_json(path: Path) -> bool:
    name = path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name
    return name.endswith((".json", ".jsonl"))


def _files(datasets: Any, local: Path, split: str) -> list[Path]:
    """Return the Parquet or JSON files of a split of a local dataset; none of others.

    Raises:
        UserError: it has other splits.
    """
    if not local.is_dir() or any((local / name).is_file() for name in (_STATE, _SPLITS)):
        return []
    files_of_splits = datasets.load_dataset_builder(str(local)).config.data_files or {}
    _expect_split(str(local), split, [*map(str, files_of_splits)])
    paths = [Path(file) for file in files_of_splits[split]]
    ours = all(path.suffix == ".parquet" or _is_json(path) for path in paths)
    return paths if ours else []


def _load(datasets: Any, path: str, split: str, streaming: bool) -> Any:
    local = Path(path)
    if (local / _STATE).is_file():
        rows = datasets.load_from_disk(path)
        _expect_split(path, split, [str(rows.split or split)])
        return rows
    if (local / _SPLITS).is_file():
        saved = datasets.load_from_disk(path)
        _expect_split(path, split, list(saved))
        return saved[split]
    name, _, configuration = (path, "", "") if local.is_dir() else path.partition(":")
    return datasets.load_dataset(name, configuration or None, split=split, streaming=streaming)


def _expect_split(path: str, split: str, valid: list[str]) -> None:
    if split not in valid:
        splits = " or ".join(sorted(valid))
        raise UserError(f"data.path {path!r}: no split {split!r}; set data.split to {splits}")


def _fix(local: Path, reason: str) -> str:
    if local.exists():
        return f"cannot read it as a Hugging Face dataset ({reason}); check its files"
    name = str(local).partition(":")[0]
    return (
        f"cannot load it from the hub ({reason}); check name and network, or fetch it elsewhere: "
        f"hf download {name} --repo-type dataset --local-dir FOLDER, and give that folder"
    )


def read_parquet(path: Path, fields: Fields = FIELDS) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id (the number from 1) and row, of the columns of `fields` and `id`.

    Raises:
        UserError: not Parquet, or a column is missing.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(_MISSING) from None
    number = 0
    try:
        # without these options it keeps a whole group of rows
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names = file.schema_arrow.names
            _expect_columns(str(path), names, fields)
            columns = [n for n in ("id", fields.title or "title", fields.text) if n in names]
            for batch in file.iter_batches(_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield f"record {number}", str(number), row
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read as Parquet ({reason}); fetch it again") from None


def _expect_columns(table: str, names: list[str], fields: Fields) -> None:
    """Check that the columns of a table contain the text, and the title if it is named.

    Raises:
        UserError: one is missing.
    """
    for key, name in (("text_column", fields.text), ("title_column", fields.title)):
        if name is not None and name not in names:
            raise UserError(
                f"{table}: no column {name!r} (it has {', '.join(names)[:200]}); "
                f"set data.{key} to the right one"
            )
