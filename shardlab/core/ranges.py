"""Sets of integers as text, such as `0-2,8`: CPUs and layers."""

import re
from collections.abc import Iterable

_PART = re.compile("([0-9]{1,6})(?:-([0-9]{1,6}))?")


def parse_ranges(text: str) -> tuple[int, ...]:
    """Parse `0-2,8` to (0, 1, 2, 8), ascending.

    Raises:
        ValueError: The text has another form, is empty, or has a descending range.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"{text!r} is not of numbers and ranges, such as 0-3,8")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers as `parse_ranges` reads them."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, bounds)) for bounds in ranges)
