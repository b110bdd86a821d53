"""Encodings and routes of the messages of a strategy, with the fitted costs of their codecs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardlab.config.calibration_record import Operation, PhasedOperation
from shardlab.config.codec_options import CodecSpec, PowerSgdSpec
from shardlab.config.codec_table import codec_text
from shardlab.config.strategy import CanonicalStrategy
from shardlab.config.timing_record import UnitSize
from shardlab.core.errors import UserError
from shardlab.forecast.machine import CodecLines, Line, Machine, PhasedLines

Phased = Mapping[PhasedOperation, PhasedLines]


class Coding(NamedTuple):
    """Encoding and route of one kind of message."""

    codec: CodecLines | None
    """None: uncompressed"""
    native: bool
    """whether the process group's own collectives carry it"""
    minimum_size: int
    element_bytes: int
    """of an uncompressed element"""
    summable: bool = False
    """whether sums of payloads are payloads: an all-reduce encodes once"""
    phased: Phased | None = None
    """of a multi-phase method, which has no payload"""


NORM = Coding(None, True, 0, 4)
"""of the number that gradient clipping sums over ranks"""


class Levels(NamedTuple):
    """Codings of gradients on a mesh of ranks."""

    inside: Coding
    """within nodes, or everywhere"""
    between: Coding | None = None
    """between nodes, where gradients have two levels"""
    ranks_per_node: int | None = None
    """of two levels; None: as many as the launcher starts on a machine"""

    @property
    def replicas(self) -> Coding:
        """Return the coding between replicas of the model, which has one level."""
        return self.between or self.inside


def codings(strategy: CanonicalStrategy, machine: Machine) -> tuple[Levels, Coding]:
    """Return the codings of gradients and weights of a canonical strategy.

    Raises:
        KeyError: a codec that was not calibrated.
    """
    gradients, weights = strategy.gradients, strategy.weights
    reduced = 4 if strategy.reduce_dtype == "fp32" else 2

    def coding(codec: CodecSpec) -> Coding:
        kind = codec_text(codec), gradients.error_feedback
        uncompressed = Coding(None, gradients.route == "native", gradients.minimum_size, reduced)
        if codec.name == "none":
            return uncompressed
        if codec.multi_phase:
            return uncompressed._replace(phased=machine.phased[kind])
        return uncompressed._replace(codec=machine.codecs[kind], summable=codec.summable)

    other = gradients.between_nodes
    between = None if other is None else coding(other)
    levels = Levels(coding(gradients.codec), between, gradients.ranks_per_node)
    computed = 4 if strategy.param_dtype in ("auto", "fp32") else 2
    if weights is None:
        return levels, NORM._replace(element_bytes=computed)
    codec = machine.codecs[codec_text(weights.codec), False]
    return levels, Coding(codec, True, weights.minimum_size, computed)


def levels_of_units(
    strategy: CanonicalStrategy, levels: Levels, units: Sequence[UnitSize], world_size: int
) -> list[Levels]:
    """Return the coding of the gradients of each unit.

    They differ for a method that factors matrices, whose messages follow from the shapes in a unit.

    Raises:
        UserError: the units are of a timing that did not record shapes.
    """
    codec, lines = strategy.gradients.codec, levels.inside.phased
    if not isinstance(codec, PowerSgdSpec) or lines is None:
        return [levels] * len(units)
    if not all(unit.matrices for unit in units if unit.elements):
        raise UserError(f"{strategy.label()}: its timing lacks the shapes of matrices: repeat it")
    phased = [powersgd_phases(codec.rank, unit.matrices, world_size, lines) for unit in units]
    return [levels._replace(inside=levels.inside._replace(phased=lines)) for lines in phased]


def powersgd_phases(
    rank: int, matrices: Sequence[tuple[int, int]], world_size: int, lines: Phased
) -> Phased:
    """Return the phases of `shardlab.codecs.powersgd` on one vector, the same for every length.

    Args:
        matrices: rows and columns of its parameters.
        lines: calibrated on square matrices.
    """
    phases: dict[PhasedOperation, PhasedLines] = {}
    for operation, line in lines.items():
        scattered = operation == "reduce_scatter"
        factored = [m for m in matrices if (1 + scattered) * rank * sum(m) < m[0] * m[1]]
        exact = [m for m in matrices if m not in factored]
        if scattered:
            whole = world_size * sum(-(-rows // world_size) * columns for rows, columns in exact)
        else:
            whole = sum(rows * columns for rows, columns in exact)
        # the first message carries the exact numbers, or one that says whether all are finite
        first = rank * sum(rows for rows, _ in factored) + (1 if scattered else whole)
        sizes: list[tuple[Operation, int]] = [("all_reduce", first)]
        if factored:
            sizes.append(("all_reduce", rank * sum(columns for _, columns in factored)))
        if scattered and whole:
            sizes.append(("reduce_scatter", whole))
        seconds = 0.0
        if factored:
            seconds = line.seconds.at(sum(rows * columns for rows, columns in factored))
            seconds += line.matrix * (len(factored) - 1)
        messages = tuple((way, Line(4.0 * size, 0.0)) for way, size in sizes)
        phases[operation] = PhasedLines(Line(seconds, 0.0), messages)
    return phases
