"""Rows of Hugging Face datasets."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlab.core.errors import UserError
from shardlab.data.sources.parquet import read_parquet
from shardlab.data.sources.records import Tally

_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_SAVED = "state.json", "dataset_dict.json"
"""one of them is in a folder that `save_to_disk` wrote"""


def read_huggingface(path: str, tally: Tally) -> Iterator[tuple[str, int, Any]]:
    """Yield position, number from 1 and row of the training split.

    Parquet on this machine is read in bounded memory; of the hub, a row group at a time.

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
        if files := _parquet_files(datasets, Path(path)):
            yield from read_parquet(files, tally)
            return
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


def _parquet_files(datasets: Any, place: Path) -> list[Path]:
    """Return the Parquet files of the training split of a local dataset."""
    if place.is_file():
        return [place] if place.suffix == ".parquet" else []
    if not place.is_dir() or any((place / name).is_file() for name in _SAVED):
        return []
    files = datasets.load_dataset_builder(str(place)).config.data_files or {}
    paths = [Path(file) for file in files.get("train", ())]
    return paths if all(each.suffix == ".parquet" for each in paths) else []


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
