"""The calibrated machine: transport, codecs and copies as lines of time over size.

Operations are alpha-beta models, t = alpha + beta x (Hockney 1994, The communication challenge for
MPP). Points are weighted by 1/t^2: small and large operations count alike.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, get_args

import numpy as np

from shardlab.core.errors import UserError
from shardlab.results.calibration_record import (
    Calibration,
    CodecCost,
    MemoryCost,
    MemoryOperation,
    Operation,
    PhasedCost,
    PhasedOperation,
    Transfer,
)

CodecKey = tuple[str, bool]
"""codec text, and whether error feedback wraps it"""


class Line(NamedTuple):
    """Line alpha + beta x."""

    alpha: float
    beta: float

    def at(self, x: float) -> float:
        """Return the value for size x."""
        return self.alpha + self.beta * x


def fit_line(sizes: Sequence[float], values: Sequence[float]) -> Line:
    """Fit a line by least squares of relative errors; alpha and beta are not negative.

    Args:
        sizes, values: points of two sizes or more.
    """
    # here, since `plan` fits nothing and runs where scipy is not installed
    from scipy.optimize import nnls

    x, t = np.asarray(sizes, float), np.asarray(values, float)
    scale = x.max()  # sizes of the order of 1, which the solver needs
    (alpha, beta), _ = nnls(np.column_stack([1 / t, x / scale / t]), np.ones_like(t))
    return Line(float(alpha), float(beta / scale))


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile: other load on a machine only ever lengthens an operation."""
    return float(np.quantile(seconds, 0.25))


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


class Machine(NamedTuple):
    """Fitted operations of a machine; a collective of W ranks has W - 1 steps."""

    transport: Mapping[Operation, Line]
    """CPU seconds of a rank for each of its W - 1 peers, over the bytes per peer"""
    codecs: Mapping[CodecKey, CodecLines]
    memory: Mapping[MemoryOperation, Line]
    """seconds over bytes"""
    phased: Mapping[CodecKey, Mapping[PhasedOperation, PhasedLines]] = MappingProxyType({})
    """multi-phase methods"""


def fit_machine(calibration: Calibration) -> Machine:
    """Fit the machine on a calibration.

    Raises:
        UserError: it lacks an operation.
    """
    codecs: dict[CodecKey, list[CodecCost]] = {}
    for codec in calibration.codecs:
        codecs.setdefault((codec.codec, codec.error_feedback), []).append(codec)
    phased: dict[CodecKey, dict[PhasedOperation, list[PhasedCost]]] = {}
    for cost in calibration.phased:
        ways = phased.setdefault((cost.codec, cost.error_feedback), {})
        ways.setdefault(cost.operation, []).append(cost)
    memory: dict[MemoryOperation, list[MemoryCost]] = {}
    for moved in calibration.memory:
        memory.setdefault(moved.operation, []).append(moved)
    return Machine(
        {name: _fit_transport(calibration.transfers, name) for name in get_args(Operation)},
        {kind: _fit_codec(costs) for kind, costs in codecs.items()},
        {
            name: fit_line([c.nbytes for c in costs], [lower_quartile(c.seconds) for c in costs])
            for name, costs in memory.items()
        },
        {
            kind: {name: _fit_phases(costs) for name, costs in ways.items()}
            for kind, ways in phased.items()
        },
    )


def _fit_transport(transfers: Sequence[Transfer], name: Operation) -> Line:
    own = [t for t in transfers if t.operation == name]
    if len({t.nbytes for t in own}) < 3:
        raise UserError(f"calibration: fewer than 3 sizes of {name}: repeat shardlab calibrate")
    return fit_line(
        [t.wire_bytes / (t.world_size - 1) for t in own],
        [lower_quartile(t.seconds) / (t.world_size - 1) for t in own],
    )


def _fit_codec(costs: Sequence[CodecCost]) -> CodecLines:
    sizes = [cost.elements for cost in costs]
    return CodecLines(
        fit_line(sizes, [lower_quartile(cost.encode_s) for cost in costs]),
        fit_line(sizes, [lower_quartile(cost.decode_s) for cost in costs]),
        fit_line(sizes, [cost.payload_bytes for cost in costs]),
        any(cost.variable for cost in costs),
    )


def _fit_phases(costs: Sequence[PhasedCost]) -> PhasedLines:
    """Fit the sizes whose phases are those of the largest: short vectors may be sent as they are.

    Raises:
        UserError: there are fewer than 3.
    """
    largest = max(costs, key=lambda cost: cost.elements)
    phases = [message.operation for message in largest.messages]
    alike = [cost for cost in costs if [m.operation for m in cost.messages] == phases]
    if len(alike) < 3:
        raise UserError(
            f"calibration: {largest.codec}: fewer than 3 sizes with phases {', '.join(phases)}: "
            "repeat shardlab calibrate with other options of it"
        )
    sizes = [cost.elements for cost in alike]
    messages = tuple(
        (operation, fit_line(sizes, [cost.messages[index].nbytes for cost in alike]))
        for index, operation in enumerate(phases)
    )
    return PhasedLines(fit_line(sizes, [lower_quartile(cost.seconds) for cost in alike]), messages)
