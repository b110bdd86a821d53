"""Lists of CPUs as Linux writes them, such as `0-3,8`, and the CPU affinity of the ranks."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from shardlab.core.errors import UserError

_RANGE = re.compile("([0-9]{1,6})(?:-([0-9]{1,6}))?")


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse `0-2,8` to (0, 1, 2, 8), ascending.

    Raises:
        UserError: anything else, also an empty list or a range that falls.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UserError(f"list of CPUs {text!r}: write numbers and ranges, such as 0-3,8")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """Format CPUs as `parse_cpus` reads them; empty for none."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][-1] + 1:
            ranges[-1][1:] = [cpu]
        else:
            ranges.append([cpu])
    return ",".join("-".join(map(str, each)) for each in ranges)


_POLICIES = Literal["auto", "cores", "none"]


def _checked(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        if value in get_args(_POLICIES):
            return value
        raise UserError(
            f"expected {', '.join(get_args(_POLICIES))} or CPUs for each rank, such as "
            "['0-3', '4-7']"
        )
    for cpus in value:
        parse_cpus(str(cpus))
    return tuple(value)


CpuAffinity = Annotated[_POLICIES | tuple[str | int, ...], BeforeValidator(_checked)]
"""Value of `train.placement`; `shardlab.config.schema.Train` describes it."""
