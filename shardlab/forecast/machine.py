"""The measured machine: transport and codecs fitted on a calibration, emulated links by rule.

Operations are alpha-beta models, t = alpha + beta x (Hockney 1994, The communication challenge for
MPP). Points are weighted by 1/t^2: small and large operations count alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from shardlab.config.calibration_record import (
    Calibration,
    CodecCost,
    MemoryCost,
    MemoryOperation,
    Operation,
    PhasedCost,
    PhasedOperation,
    Transfer,
)
from shardlab.config.link import FRAME_HEADERS, bucket_bytes
from shardlab.core.errors import UserError
from shardlab.core.interval import interval_factor

_OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_PAYLOAD = 1448
"""payload bytes of a full Ethernet frame: 1500 less IP and TCP headers with time stamps"""
_PACKET = 64 << 10
"""bytes of one TCP segment handed to the kernel, which a link may leave whole"""


class Line(NamedTuple):
    """Line alpha + beta x with the covariance of both parameters."""

    alpha: float
    beta: float
    covariance: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    points: int = 0

    def at(self, x: float) -> float:
        """Return the seconds for size x."""
        return self.alpha + self.beta * x

    def scaled(self, factor: float) -> "Line":
        """Return the line of values so many times as large."""
        (a, b), (_, c) = self.covariance
        covariance = ((factor**2 * a, factor**2 * b), (factor**2 * b, factor**2 * c))
        return Line(factor * self.alpha, factor * self.beta, covariance, self.points)

    def intervals(self) -> tuple[float, float]:
        """Return half the width of the 95 % intervals of alpha and beta, by Student's t."""
        freedom = self.points - 2
        # the factor is of a mean: without its root it is the quantile
        quantile = interval_factor(freedom + 1) * (freedom + 1) ** 0.5
        alpha, beta = (max(self.covariance[i][i], 0.0) ** 0.5 for i in (0, 1))
        return quantile * alpha, quantile * beta


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a line by least squares of relative errors; alpha and beta are not negative.

    Args:
        sizes, seconds: three points or more, of two sizes or more.
    """
    x, t = np.asarray(sizes, float), np.asarray(seconds, float)
    # sizes are scaled to the order of 1, which the solver needs
    scale = x.max()
    weighted = np.column_stack([1 / t, x / scale / t])
    found = lsq_linear(weighted, np.ones_like(t), bounds=(0, np.inf))
    residuals: NDArray[np.float64] = weighted @ found.x - 1
    variance = float(residuals @ residuals) / max(len(t) - 2, 1)
    covariance = variance * np.linalg.inv(weighted.T @ weighted)
    covariance /= np.outer([1, scale], [1, scale])
    alpha, beta = found.x / [1, scale]
    (a, b), (_, c) = covariance.tolist()
    return Line(float(alpha), float(beta), ((a, b), (b, c)), len(t))


def quickly(seconds: Sequence[float]) -> float:
    """Return the lower quartile: other load on a machine only ever lengthens an operation."""
    return float(np.quantile(seconds, 0.25))


def framing(bits_per_second: float) -> float:
    """Return the bytes on an emulated link per byte sent, with equal load in both directions.

    The link counts the headers of every frame. If its bucket is too small for a whole packet, the
    kernel cuts it up, and the receiver answers every second frame (RFC 1122, 4.2.3.2); it answers a
    whole packet once, which hardly counts.
    """
    headers = FRAME_HEADERS / _PAYLOAD
    whole = bucket_bytes(round(bits_per_second)) >= _PACKET * (1 + headers)
    return 1 + headers * (1 if whole else 1.5)


class CodecLines(NamedTuple):
    """Fitted costs of one codec."""

    encode: Line
    """encode seconds over elements"""
    decode: Line
    """decode seconds over elements of one payload"""
    payload: Line
    """payload bytes over elements"""
    variable: bool = False
    """whether ranks exchange the sizes of payloads first"""


class PhasedLines(NamedTuple):
    """Fitted costs of a multi-phase method in one collective, over elements of the whole vector."""

    seconds: Line
    """CPU seconds between all phases"""
    messages: tuple[tuple[Operation, Line], ...]
    """bytes of the whole vector of each phase"""
    matrix: float = 0.0
    """CPU seconds for each matrix after the first, where a method factors matrices"""

    def scaled(self, factor: float) -> "PhasedLines":
        """Return the costs on a machine that is slower by a factor."""
        seconds, matrix = self.seconds.scaled(factor), factor * self.matrix
        return self._replace(seconds=seconds, matrix=matrix)


class Machine(NamedTuple):
    """Fitted operations of a machine; a collective of W ranks has W - 1 steps."""

    transport: dict[Operation, Line]
    """CPU seconds of a rank for each of its W - 1 peers, over the bytes per peer"""
    codecs: dict[tuple[str, bool], CodecLines]
    """by codec text and error feedback"""
    memory: dict[MemoryOperation, Line]
    """seconds over bytes, of the calibrated memory operations"""
    phased: Mapping[tuple[str, bool], Mapping[PhasedOperation, PhasedLines]] = MappingProxyType({})
    """multi-phase methods, by codec text and error feedback"""

    def scaled(self, factor: float) -> "Machine":
        """Return a machine that is slower by a factor."""
        codecs = {
            kind: each._replace(
                encode=each.encode.scaled(factor), decode=each.decode.scaled(factor)
            )
            for kind, each in self.codecs.items()
        }
        transport = {name: line.scaled(factor) for name, line in self.transport.items()}
        memory = {name: line.scaled(factor) for name, line in self.memory.items()}
        phased = {
            kind: {name: each.scaled(factor) for name, each in lines.items()}
            for kind, lines in self.phased.items()
        }
        return Machine(transport, codecs, memory, phased)


def fit_machine(calibration: Calibration) -> Machine:
    """Fit the machine on a calibration.

    Raises:
        UserError: it lacks an operation.
    """
    transport = {name: _transport(calibration.transfers, name) for name in _OPERATIONS}
    kinds = {(each.codec, each.error_feedback) for each in calibration.codecs}
    codecs = {kind: _codec(calibration.codecs, kind) for kind in kinds}
    methods = dict.fromkeys((each.codec, each.error_feedback) for each in calibration.phased)
    phased = {kind: _phased(calibration.phased, kind) for kind in methods}
    return Machine(transport, codecs, fit_memory(calibration.memory), phased)


def fit_memory(costs: Sequence[MemoryCost]) -> dict[MemoryOperation, Line]:
    """Fit every memory operation that was measured."""
    found: dict[MemoryOperation, list[MemoryCost]] = {}
    for each in costs:
        found.setdefault(each.operation, []).append(each)
    return {
        name: fit_line([float(c.nbytes) for c in mine], [quickly(c.seconds) for c in mine])
        for name, mine in found.items()
    }


def _transport(transfers: Iterable[Transfer], name: Operation) -> Line:
    """Return the transfers that were measured without an emulated link."""
    mine = [t for t in transfers if t.operation == name and t.bits_per_second is None]
    if len({t.nbytes for t in mine}) < 3:
        raise UserError(f"calibration: fewer than 3 sizes of {name}: repeat stages.calibrate")
    peers = [t.world_size - 1 for t in mine]
    return fit_line(
        [t.wire_bytes / n for t, n in zip(mine, peers, strict=True)],
        [quickly(t.seconds) / n for t, n in zip(mine, peers, strict=True)],
    )


def _codec(costs: Iterable[CodecCost], kind: tuple[str, bool]) -> CodecLines:
    mine = [each for each in costs if (each.codec, each.error_feedback) == kind]
    sizes = [float(each.elements) for each in mine]
    return CodecLines(
        fit_line(sizes, [quickly(each.encode_s) for each in mine]),
        fit_line(sizes, [quickly(each.decode_s) for each in mine]),
        fit_line(sizes, [float(each.payload_bytes) for each in mine]),
        any(each.variable for each in mine),
    )


def _phased(
    costs: Iterable[PhasedCost], kind: tuple[str, bool]
) -> dict[PhasedOperation, PhasedLines]:
    found: dict[PhasedOperation, list[PhasedCost]] = {}
    for each in costs:
        if (each.codec, each.error_feedback) == kind:
            found.setdefault(each.operation, []).append(each)
    return {name: _lines_of_phases(mine) for name, mine in found.items()}


def _lines_of_phases(costs: Sequence[PhasedCost]) -> PhasedLines:
    """Fit the sizes whose phases are those of the largest: short vectors may be sent as they are.

    Raises:
        UserError: there are fewer than 3.
    """
    largest = max(costs, key=lambda each: each.elements)
    phases = [message.operation for message in largest.messages]
    alike = [each for each in costs if [m.operation for m in each.messages] == phases]
    mine = [each for each in alike if each.matrices == 1]
    if len(mine) < 3:
        raise UserError(
            f"calibration: {largest.codec}: fewer than 3 sizes with phases {', '.join(phases)}: "
            "repeat stages.calibrate with other options of it"
        )
    sizes = [float(each.elements) for each in mine]
    messages = tuple(
        (operation, fit_line(sizes, [float(each.messages[index].nbytes) for each in mine]))
        for index, operation in enumerate(phases)
    )
    seconds = fit_line(sizes, [quickly(each.seconds) for each in mine])
    more = [
        (quickly(each.seconds) - seconds.at(each.elements)) / (each.matrices - 1)
        for each in alike
        if each.matrices > 1
    ]
    return PhasedLines(seconds, messages, max(median(more), 0.0) if more else 0.0)
