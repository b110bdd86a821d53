"""CPU affinity of the ranks, as params.yaml states it."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from shardlab.core.cpu_sets import parse_cpus
from shardlab.core.errors import UserError

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
"""Value of `train.placement`; `shardlab.experiment.schema.Train` describes it."""
