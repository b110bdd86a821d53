"""A simulated step as a Chakra execution trace, for other simulators such as ASTRA-sim.

Schema: MLCommons Chakra, schema/protobuf/et_def.proto (Sridharan et al. 2023). A `.et` file is a
GlobalMetadata message and then Node messages, each after its length as a varint. All ranks of a
step do the same: simulators that want a file per rank take copies of this one. The few messages
that are needed are written by hand (protobuf.dev, Encoding), so that no generated code is needed.
"""

import struct
from collections.abc import Iterator, Sequence

from shardlab.config.calibration_record import Operation
from shardlab.forecast.schedule import Phase, Task

VERSION = "0.0.4"
"""schema version, as written by Chakra's own generator"""
COMP_NODE, COMM_COLL_NODE = 4, 7
COLLECTIVES: dict[Operation, int] = {
    "all_reduce": 0,
    "gather": 2,
    "exchange": 6,
    "reduce_scatter": 7,
}
"""values of CollectiveCommType: ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER"""


def execution_trace(tasks: Sequence[Task]) -> bytes:
    """Return the content of a `.et` file: one node per phase that computes or communicates.

    Computation and copies have their duration in microseconds, collectives the bytes of the whole
    vector: how long those take is for the simulator to say. Nodes of one lane follow one another.
    """
    messages = [_text(1, VERSION)]
    ends: dict[str, int] = {}
    lanes: dict[str, int] = {}
    number = 0
    for task in tasks:
        after = [ends[name] for name in task.after if name in ends]
        for phase in _shown(task):
            follows = [lanes[task.lane]] if task.lane in lanes else []
            messages.append(_node(number, task.name, phase, after, follows))
            ends[task.name] = lanes[task.lane] = number
            after = []
            number += 1
    return b"".join(_varint(len(message)) + message for message in messages)


def _shown(task: Task) -> Iterator[Phase]:
    """Keep one node per task, so that later tasks can depend on it."""
    shown = [phase for phase in task.phases if phase.operation or phase.cpu or phase.wait]
    yield from shown or [Phase()]


def _node(
    number: int, name: str, phase: Phase, after: Sequence[int], follows: Sequence[int]
) -> bytes:
    """Encode one Node: id, name, type, ctrl_deps, data_deps, duration_micros, attr."""
    collective = phase.operation is not None
    node = _number(1, number) + _text(2, f"{name} ({phase.operation})" if collective else name)
    node += _number(3, COMM_COLL_NODE if collective else COMP_NODE)
    node += _packed(4, follows) + _packed(5, after)
    attributes = [_text(1, "is_cpu_op") + _number(27, 0)]
    if phase.operation is None:
        node += _number(7, round(1e6 * (phase.cpu + phase.wait)))
    else:
        attributes.append(_text(1, "comm_type") + _number(9, COLLECTIVES[phase.operation]))
        attributes.append(_text(1, "comm_size") + _number(13, round(phase.vector_bytes)))
    return node + b"".join(_bytes(10, attribute) for attribute in attributes)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + struct.pack("B", value)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _packed(field: int, values: Sequence[int]) -> bytes:
    return _bytes(field, b"".join(map(_varint, values))) if values else b""
