"""Progress messages: a bar on a terminal, lines elsewhere, and the log file of a stage."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import psutil
from tqdm import tqdm

T = TypeVar("T")

_log_path: Path | None = None
"""Log file of this process and of its forks."""
_shows = True
"""Whether stderr is not the log."""


class _Bar(tqdm):  # type: ignore[type-arg]
    @property
    def format_dict(self) -> dict[str, object]:
        """Contents of the bar, read when it is drawn and not in each step."""
        gigabytes = psutil.Process().memory_info().rss / 1e9
        return {**super().format_dict, "postfix": f"{gigabytes:.2f} GB"}


def track(
    items: Iterable[T], description: str, total: int | None = None, unit: str = "it"
) -> Iterator[T]:
    """Iterate over `items` with a bar that shows rate, remaining time and resident set.

    There is no bar if stderr is not a terminal.
    """
    return iter(
        _Bar(
            items,
            desc=description,
            total=total,
            unit=unit,
            leave=False,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )
    )


def say(message: str) -> None:
    """Print one line on stderr, above any bar, and keep it in the log.

    If stderr goes to the log, as in jobs of Snakemake, the log has the line once.
    """
    log(message)
    _show(message)


def _show(message: str) -> None:
    if _shows:
        tqdm.write(message, file=sys.stderr)
        sys.stderr.flush()


def logs_stderr() -> bool:
    """Return whether stderr goes to the log."""
    return not _shows


def log_to(path: Path) -> None:
    """Write later messages of `say` and `log` to a file."""
    global _log_path, _shows
    _log_path = path
    _shows = not (path.is_file() and os.path.samestat(path.stat(), os.fstat(2)))


def log(message: str) -> None:
    """Add a message with the time to the log, if there is one."""
    global _log_path
    if _log_path is None:
        return
    try:
        _log_path.parent.mkdir(parents=True, exist_ok=True)
        with _log_path.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {message.rstrip()}\n")
    except OSError as error:  # a stage must not fail because its log cannot be written
        _show(f"{_log_path}: no log: {error}")
        _log_path = None


def stopwatch() -> Callable[[], float]:
    """Return a function that returns the seconds since this call."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
