"""Phases of methods that factor matrices: their messages follow from the shapes in a unit."""

from collections.abc import Mapping, Sequence

from shardlab.config.calibration_record import Operation, PhasedOperation
from shardlab.config.codec_options import PowerSgdSpec
from shardlab.config.strategy import CanonicalStrategy
from shardlab.config.timing_record import UnitSize
from shardlab.core.errors import UserError
from shardlab.forecast.coding import Levels
from shardlab.forecast.machine import Line, PhasedLines

Lines = Mapping[PhasedOperation, PhasedLines]


def levels_of_units(
    strategy: CanonicalStrategy, levels: Levels, units: Sequence[UnitSize], world_size: int
) -> tuple[Levels, ...]:
    """Return the coding of the gradients of each unit; none where all units have the same.

    Raises:
        UserError: the units are of a timing that did not record shapes.
    """
    codec, lines = strategy.gradients.codec, levels.inside.phased
    if not isinstance(codec, PowerSgdSpec) or lines is None:
        return ()
    if not all(unit.matrices for unit in units if unit.elements):
        raise UserError(f"{strategy.label()}: its timing lacks the shapes of matrices: repeat it")
    return tuple(
        levels._replace(
            inside=levels.inside._replace(
                phased=powersgd_phases(codec.rank, unit.matrices, world_size, lines)
            )
        )
        for unit in units
    )


def powersgd_phases(
    rank: int, matrices: Sequence[tuple[int, int]], world_size: int, lines: Lines
) -> Lines:
    """Return the phases of `shardlab.codecs.powersgd` on one vector, the same for every length.

    Args:
        matrices: rows and columns of its parameters.
        lines: calibrated on square matrices.
    """
    found: dict[PhasedOperation, PhasedLines] = {}
    for operation, of in lines.items():
        scattered = operation == "reduce_scatter"
        factored = [m for m in matrices if (1 + scattered) * rank * sum(m) < m[0] * m[1]]
        exact = [m for m in matrices if m not in factored]
        chunk = [-(-rows // world_size) * columns for rows, columns in exact]
        whole = world_size * sum(chunk) if scattered else sum(r * c for r, c in exact)
        # the first message carries the exact numbers, or one that says whether all are finite
        first = rank * sum(rows for rows, _ in factored) + (1 if scattered else whole)
        sizes: list[tuple[Operation, int]] = [("all_reduce", first)]
        if factored:
            sizes.append(("all_reduce", rank * sum(columns for _, columns in factored)))
        if scattered and whole:
            sizes.append(("reduce_scatter", whole))
        seconds = 0.0
        if factored:
            seconds = of.seconds.at(sum(r * c for r, c in factored))
            seconds += of.matrix * (len(factored) - 1)
        messages = tuple((way, Line(4.0 * size, 0.0)) for way, size in sizes)
        found[operation] = PhasedLines(Line(seconds, 0.0), messages)
    return found
