"""What single operations cost on a machine, measured apart from any training run."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, write_json
from shardlab.records.run import LinkEmulation
from shardlab.strategy.strategy import Strategy

Operation = Literal["exchange", "gather", "all_reduce", "reduce_scatter"]
"""exchange, gather: `shardlab.transport.transport`; all_reduce, reduce_scatter: the group's own"""

MemoryOperation = Literal["copy", "update", "load", "store"]
"""copy: a vector, by a thread; update: AdamW; load, store: moments that are on a disk"""

UPDATE_BYTES = 28
"""of host memory that AdamW moves for an element of float32: parameter and two moments read and
written, gradient read"""

_PASSES: dict[Operation, int] = {
    "exchange": 1,
    "gather": 1,
    "all_reduce": 2,
    "reduce_scatter": 2,
}


def wire_bytes(operation: Operation, nbytes: float, world_size: int) -> float:
    """What a rank sends for a vector of so many bytes; gloo's reduce-scatter is an all-reduce."""
    return _PASSES[operation] * nbytes * (world_size - 1) / world_size


def memory_operations(strategy: Strategy) -> list[MemoryOperation]:
    """That a forecast of the strategy, in its canonical form, has to know."""
    if strategy.engine != "slide":
        return []
    return ["copy", "update", "load", "store"] if strategy.moments == "disk" else ["copy", "update"]


class Transfer(Document):
    """One operation on vectors of one size."""

    operation: Operation
    world_size: int
    link: str
    link_emulation: LinkEmulation
    bits_per_second: int | None
    """of the emulated link"""
    nbytes: int
    """of the whole vector that is reduced or gathered"""
    wire_bytes: float
    """that a rank sends"""
    seconds: list[float] = Field(min_length=1)
    """one for every round, of the slowest rank, after a pause"""


class CodecCost(Document):
    """One codec on vectors of one size, on all ranks at once."""

    codec: str
    """as strategies write it"""
    error_feedback: bool
    elements: int
    payload_bytes: int
    encode_s: list[float] = Field(min_length=1)
    decode_s: list[float] = Field(min_length=1)
    """of one payload of so many elements"""


class MemoryCost(Document):
    """One operation in host memory on vectors of one size, on all ranks at once."""

    operation: MemoryOperation
    nbytes: int
    """of a copy, load or store those of the vector; of an update all that it reads and writes"""
    seconds: list[float] = Field(min_length=1)


class Calibration(Document):
    """Everything that a forecast knows of a machine beside training runs."""

    transfers: list[Transfer]
    codecs: list[CodecCost]
    memory: list[MemoryCost] = []
    """where a strategy needs it"""
    revision: str
    torch: str
    host: dict[str, Any]


def read_calibration(path: str | Path) -> Calibration:
    """What `write_calibration` wrote.

    Raises:
        UserError: the file holds something else.
    """
    try:
        calibration: Calibration = validate(Calibration, read_json(path), "")
    except ValueError as error:
        fix = "run python -m stages.calibrate"
        raise UserError(f"{path}: not a calibration ({error}): {fix}") from None
    return calibration


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """One JSON document."""
    write_json(path, calibration.model_dump(mode="json"))
