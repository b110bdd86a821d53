"""Figures of one GPU: rows that parts append to one file, and the page of them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import publish, text_table
from shardlab.core.host import describe_host, torch_version
from shardlab.core.numbers import ABSENT, figure
from shardlab.predict.devices import DEVICES

OUT = Path(".work/gpu"), "folder of rows, page and traces"
_ROWS = "figures.jsonl"
_QUERY = "--query-gpu=name,driver_version,memory.total"


def on_gpu() -> bool:
    """Flag of figures of a GPU; a dry run on the CPU has small sizes."""
    return torch.cuda.device_count() > 0


def record(folder: Path, table: str, name: str, values: dict[str, Any]) -> None:
    """Append a row to the file of rows, and print it in one line.

    Args:
        values: by column: numbers, texts, or None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _ROWS).open("a") as file:
        file.write(json.dumps({"table": table, "name": name, "values": values}) + "\n")
    print(f"{name}:", ", ".join(f"{key} {_cell(value)}" for key, value in values.items()))


def forget(folder: Path) -> None:
    """Remove the rows of earlier runs."""
    (folder / _ROWS).unlink(missing_ok=True)


def write_page(folder: Path) -> None:
    """Write the page of all rows, if there are any; a later row replaces one of its name."""
    if not (folder / _ROWS).exists():
        return
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for line in (folder / _ROWS).read_text().splitlines():
        row = json.loads(line)
        tables.setdefault(row["table"], {})[row["name"]] = row["values"]
    parts = []
    for title, rows in tables.items():
        columns = [*dict.fromkeys(column for values in rows.values() for column in values)]
        cells = [[name, *(_cell(row.get(c)) for c in columns)] for name, row in rows.items()]
        parts.append(text_table(title, ["", *columns], cells))
    publish(__doc__, folder / "gpu.md", *parts, measured=_machine())


def table_device(name: str, memory: int) -> str | None:
    """Return the device of `shardlab plan` that torch calls so, with the nearest memory, if any.

    Args:
        memory: bytes.
    """
    chips = [key for key in DEVICES if key.partition("-")[0] in name.lower()]
    return min(chips, key=lambda key: abs(DEVICES[key].memory - memory), default=None)


def _cell(value: Any) -> str:
    if value is None:
        return ABSENT
    return figure(value) if isinstance(value, int | float) else str(value)


def _machine() -> list[str]:
    host = describe_host()
    device = "none: a dry run on the CPU, whose figures say nothing"
    if on_gpu():
        query = ["nvidia-smi", _QUERY, "--format=csv,noheader"]
        device = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return [
        f"GPU, driver, memory: {device}",
        f"Host: {host['cores']} cores of {host['cpu']}, {host['memory_bytes'] / 1e9:.0f} GB",
        f"Software: Python {host['python']}, torch {torch_version()}, Linux {host['kernel']}",
        "One run",
    ]
