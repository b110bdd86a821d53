"""CPUs of ranks in parameters."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from shardlab.core.errors import UserError
from shardlab.core.ranges import parse_ranges


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a list of CPUs, such as `0-3,8`, to ascending numbers.

    Raises:
        UserError: The list does not consist of numbers and ranges.
    """
    try:
        return parse_ranges(text)
    except ValueError:
        raise UserError(f"list of CPUs {text!r}: write numbers and ranges, such as 0-3,8") from None


_POLICIES = Literal["auto", "cores", "none"]


def _checked_cpus(value: Any) -> Any:
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


CpuAffinity = Annotated[_POLICIES | tuple[str | int, ...], BeforeValidator(_checked_cpus)]
"""Value of `train.placement`; `shardlab.train.settings.Train` describes it."""
