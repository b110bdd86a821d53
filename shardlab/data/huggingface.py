"""Rows of Hugging Face datasets: files on this machine, and datasets of the hub."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlab.core.errors import UserError
from shardlab.data.local_files import PACKED
from shardlab.data.settings import Data
from shardlab.data.source_records import Fields

_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv")
_SAVED = ("state.json", "dataset_dict.json")
"""Files that mark a folder written by `save_to_disk`; it has one of them."""
_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def read_huggingface(data: Data, fields: Fields) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id (the number from 1) and row of a split, a row group at a time.

    Args:
        data: Its path is a .parquet, .csv, .json or .jsonl file (JSON may be packed), a folder of
            such files, a folder that `save_to_disk` wrote, or the name of a dataset on the hub,
            with its configuration after a colon (`wikimedia/wikipedia:20231101.simple`).

    Raises:
        UserError: The `datasets` package is missing, or cannot load or read the dataset.
    """
    path = str(data.path)
    local = Path(path)
    if local.exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a local read must not ask the network
    elif not _ON_HUB.fullmatch(path) or path.endswith((*_SUFFIXES, *PACKED)):
        raise UserError(f"data.path {path!r}: no such file or folder, and no name on the hub")
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.source huggingface needs the datasets package: pip install 'shardlab[datasets]'"
        ) from None
    try:
        rows = _load(datasets, local, data, fields)
        if rows.column_names is not None:
            _expect_columns(path, rows.column_names, fields)
        for number, row in enumerate(rows, start=1):
            yield f"record {number}", str(number), row
    except UserError:
        raise
    except Exception as error:  # the readers of datasets have no common error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"data.path {path!r}: {_fix(local, reason)}") from None


def _load(datasets: Any, path: Path, data: Data, fields: Fields) -> Any:
    """Return the rows of a split, streamed unless `save_to_disk` wrote the folder."""
    if path.is_file():
        if not any(suffix in path.suffixes for suffix in _SUFFIXES):
            raise UserError(
                f"{path}: expected one of {', '.join(_SUFFIXES)} (JSON also packed: "
                f"{', '.join(PACKED)}); for plain text set data.source to text"
            )
        kind = {".parquet": "parquet", ".csv": "csv"}.get(path.suffix, "json")
        options = _as_text(kind, fields)
        return datasets.load_dataset(
            kind, data_files=str(path), split="train", streaming=True, **options
        )
    split = data.split or "train"
    if any((path / name).is_file() for name in _SAVED):
        saved = datasets.load_from_disk(str(path))
        return saved[split] if isinstance(saved, dict) else saved
    if path.is_dir():
        # absolute, since a folder may have the name of a loader, such as text or csv
        name, configuration = str(path.absolute()), None
    else:
        name, _, config_name = str(path).partition(":")
        configuration = config_name or None
    kind = datasets.load_dataset_builder(name, configuration).name
    return datasets.load_dataset(
        name,
        configuration,
        split=split,
        streaming=data.streaming or path.is_dir(),
        **_as_text(kind, fields),
    )


def _as_text(kind: str, fields: Fields) -> dict[str, Any]:
    """Return options with which pandas does not convert texts such as `null`, `NA` and `10`."""
    if kind != "csv":
        return {}
    converters = dict.fromkeys((fields.text, fields.title or "title"), str)
    return {"converters": converters, "keep_default_na": False, "na_values": [""]}


def _fix(local: Path, reason: str) -> str:
    if local.exists():
        fix = "check data.split and files"
        if "DataFilesNotFound" in reason:
            fix = (
                f"name the files {', '.join(_SUFFIXES)}, or join JSON lines to one file and set "
                "data.source to jsonl"
            )
        return f"cannot read it as a Hugging Face dataset ({reason}); {fix}"
    name = str(local).partition(":")[0]
    return (
        f"cannot load it from the hub ({reason}); check name and network, or fetch it elsewhere: "
        f"hf download {name} --repo-type dataset --local-dir FOLDER, and give that folder"
    )


def _expect_columns(path: str, names: list[str], fields: Fields) -> None:
    """Check that the table has the column of the text, and of the title if it is named.

    Raises:
        UserError: A column is missing.
    """
    for key, name in (("text_column", fields.text), ("title_column", fields.title)):
        if name is not None and name not in names:
            raise UserError(
                f"data.path {path!r}: no column {name!r} (it has {', '.join(names)[:200]}); "
                f"set data.{key} to the right one"
            )
