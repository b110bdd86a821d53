"""Progress for a person: a bar on a terminal, an occasional line elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track(
    items: Iterable[T], description: str, total: int | None = None, unit: str = "it"
) -> Iterator[T]:
    """Iterate over `items` with a bar of rate and time left; silent when stderr is a pipe."""
    return iter(
        tqdm(
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
    """Print one line on stderr, above any bar."""
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()


def stopwatch() -> Callable[[], float]:
    """Return a function that returns the seconds since this call."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
