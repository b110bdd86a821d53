"""Records of a calibration: costs of single operations on a machine."""

from typing import Any, Literal

from pydantic import Field

from shardlab.core.document import Document
from shardlab.results.contention import Contention
from shardlab.strategy.document import CanonicalStrategy

Operation = Literal["exchange", "gather", "all_reduce", "reduce_scatter"]
"""exchange, gather: collectives of `shardlab.comm.transport`; all_reduce, reduce_scatter: of the
process group."""

PhasedOperation = Literal["reduce_scatter", "all_reduce"]
"""Collective that a multi-phase method implements."""

MemoryOperation = Literal["copy", "update"]
"""copy: copy of a vector by a thread; update: AdamW step."""

UPDATE_BYTES = 28
"""Bytes of host memory that AdamW moves per float32 element: parameter and two moments read and
written, gradient read."""

_PASSES: dict[Operation, int] = {
    "exchange": 1,
    "gather": 1,
    "all_reduce": 2,
    "reduce_scatter": 2,
}


def wire_bytes(operation: Operation, nbytes: float, world_size: int) -> float:
    """Return the bytes a rank sends for a vector; gloo's reduce-scatter is an all-reduce."""
    return _PASSES[operation] * nbytes * (world_size - 1) / world_size


def memory_operations(strategy: CanonicalStrategy) -> list[MemoryOperation]:
    """Return the memory operations that a forecast of a canonical strategy needs."""
    if strategy.traits.residency == "streamed":
        return ["copy", "update"]
    return ["copy"] if strategy.sync else []


class Transfer(Document):
    """Timings of one collective on vectors of one size."""

    operation: Operation
    world_size: int
    link: str
    nbytes: int
    """Bytes of the full vector that is reduced or gathered."""
    wire_bytes: float
    """Bytes that a rank sends."""
    seconds: list[float] = Field(min_length=1)
    """Times of the slowest rank after a pause, one per repetition."""


class CodecCost(Document):
    """Timings of one codec on vectors of one size, on all ranks concurrently."""

    codec: str
    """Codec text, as in strategies."""
    error_feedback: bool
    elements: int
    payload_bytes: float
    """Mean size of a message."""
    variable: bool
    """Whether sizes may differ; ranks then exchange sizes before payloads."""
    encode_s: list[float] = Field(min_length=1)
    decode_s: list[float] = Field(min_length=1)
    """Seconds to decode one payload with this number of elements."""


class Message(Document):
    """Message of one phase of a multi-phase method."""

    operation: Operation
    """Collective of the message. reduce_scatter: by the backend, or on gloo an exchange with sums
    at the receiver."""
    nbytes: int
    """Bytes of the full vector of all ranks."""


class PhasedCost(Document):
    """Timings of the computation of a multi-phase method on vectors of one size, on all ranks
    concurrently, and its messages in a typical step."""

    codec: str
    error_feedback: bool
    operation: PhasedOperation
    elements: int
    """Elements of the full vector."""
    messages: list[Message]
    seconds: list[float] = Field(min_length=1)


class MemoryCost(Document):
    """Timings of one host memory operation on vectors of one size, on all ranks concurrently."""

    operation: MemoryOperation
    nbytes: int
    """copy: bytes of the vector; update: all bytes read and written."""
    seconds: list[float] = Field(min_length=1)


class Calibration(Document):
    """Measurements of a machine that a forecast is fitted on, in addition to training runs."""

    transfers: list[Transfer]
    codecs: list[CodecCost]
    phased: list[PhasedCost] = []
    """Costs of the multi-phase methods among the codecs."""
    memory: list[MemoryCost] = []
    """Costs of memory operations; empty where no strategy needs them."""
    contention: Contention | None
    """CPU time that other processes used, in the timing with most of it; None: not counted."""
    revision: str
    torch: str
    host: dict[str, Any]
    kernels: str
    """Library that computed, as in `Result.kernels`."""
