"""Types of command-line arguments; argparse reports other values in one line."""

import argparse
import re
from contextlib import suppress


def nodes(text: str) -> tuple[int, int]:
    """Parse `NODESxDEVICES`, such as `2x8`."""
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,2})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected nodes x devices, as in 2x8 (found {text!r})")
    return int(match[1]), int(match[2])


def positive(text: str) -> float:
    """Parse a number above 0."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < 1e99:
            return value
    raise argparse.ArgumentTypeError(f"expected a number above 0 (found {text!r})")


def count(text: str) -> float:
    """Parse a number above 0 with an optional prefix such as T at its end."""
    suffixes = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
    factor = suffixes.get(text[-1:].lower())
    return positive(text) if factor is None else factor * positive(text[:-1])
