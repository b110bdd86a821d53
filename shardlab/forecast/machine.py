"""What a calibration says of the machine that was measured: its transport, its link, its codecs."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple, get_args

import numpy as np

from shardlab.core.calibration import Calibration, CodecCost, Operation, Transfer
from shardlab.core.errors import UserError
from shardlab.core.link import bucket_bytes
from shardlab.forecast.fit import Line, fit_line

_OPERATIONS: tuple[Operation, ...] = get_args(Operation)
FRAMING = 1514 / 1448
"""bytes of Ethernet frames per byte of payload, where no link was measured"""


def quickly(seconds: Sequence[float]) -> float:
    """The lower quartile: what else runs on a machine only ever makes an operation longer."""
    return float(np.quantile(seconds, 0.25))


class CodecLines(NamedTuple):
    """Costs of one codec."""

    encode: Line
    """over elements"""
    decode: Line
    """over elements of one payload"""
    payload: Line
    """bytes over elements"""


class Machine(NamedTuple):
    """The fits; operations of W ranks have W - 1 steps or rounds."""

    transport: dict[Operation, Line]
    """CPU seconds of a rank for each of its W - 1 peers, over the bytes for one peer"""
    framing: dict[Operation, float]
    """bytes through an emulated link per byte sent: frames, acknowledgements, pauses"""
    codecs: dict[tuple[str, bool], CodecLines]
    """by text and error feedback"""


def learn(calibration: Calibration) -> Machine:
    """The machine of a calibration.

    Raises:
        UserError: it lacks an operation.
    """
    transport = {name: _transport(calibration.transfers, name) for name in _OPERATIONS}
    framing = {name: _framing(calibration.transfers, name) for name in _OPERATIONS}
    kinds = {(each.codec, each.error_feedback) for each in calibration.codecs}
    return Machine(transport, framing, {kind: _codec(calibration.codecs, kind) for kind in kinds})


def _transport(transfers: Iterable[Transfer], name: Operation) -> Line:
    """Without an emulated link."""
    mine = [t for t in transfers if t.operation == name and t.bits_per_second is None]
    if len({t.nbytes for t in mine}) < 3:
        raise UserError(f"calibration: fewer than 3 sizes of {name}: repeat stages.calibrate")
    peers = [t.world_size - 1 for t in mine]
    return fit_line(
        [t.wire_bytes / n for t, n in zip(mine, peers, strict=True)],
        [quickly(t.seconds) / n for t, n in zip(mine, peers, strict=True)],
    )


def _framing(transfers: Iterable[Transfer], name: Operation) -> float:
    """Median over sizes that do not pass at once, of the bytes that the time on a link stands for.

    The link was idle before, so one bucket has passed at once.
    """
    found = []
    for each in transfers:
        rate = each.bits_per_second
        if each.operation != name or rate is None or each.link_emulation != "namespaces":
            continue
        bucket = bucket_bytes(rate)
        if each.wire_bytes > 2 * bucket:
            found.append((quickly(each.seconds) * rate / 8 + bucket) / each.wire_bytes)
    return median(found) if found else FRAMING


def _codec(costs: Iterable[CodecCost], kind: tuple[str, bool]) -> CodecLines:
    mine = [each for each in costs if (each.codec, each.error_feedback) == kind]
    sizes = [float(each.elements) for each in mine]
    return CodecLines(
        fit_line(sizes, [quickly(each.encode_s) for each in mine]),
        fit_line(sizes, [quickly(each.decode_s) for each in mine]),
        fit_line(sizes, [float(each.payload_bytes) for each in mine]),
    )
