"""Encodings and routes of the messages of a strategy, with the fitted costs of their codecs."""

from collections.abc import Mapping
from typing import NamedTuple

from shardlab.config.calibration_record import PhasedOperation, memory_operations
from shardlab.config.codec_options import CodecSpec
from shardlab.config.codec_table import codec_text
from shardlab.config.strategy import CanonicalStrategy
from shardlab.forecast.machine import CodecLines, Machine, PhasedLines


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
    phased: Mapping[PhasedOperation, PhasedLines] | None = None
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
    given, weights = strategy.gradients, strategy.weights
    reduced = 4 if strategy.reduce_dtype == "fp32" else 2

    def coding(codec: CodecSpec) -> Coding:
        plain, kind = codec.name == "none", (codec_text(codec), given.error_feedback)
        native = given.route == "native"
        if codec.multi_phase:
            phased = machine.phased[kind]
            return Coding(None, native, given.minimum_size, reduced, phased=phased)
        lines = None if plain else machine.codecs[kind]
        return Coding(lines, native, given.minimum_size, reduced, codec.summable and not plain)

    between = None if given.between_nodes is None else coding(given.between_nodes)
    gradients = Levels(coding(given.codec), between, given.ranks_per_node)
    computed = 4 if strategy.param_dtype in ("auto", "fp32") else 2
    if weights is None:
        return gradients, NORM._replace(element_bytes=computed)
    codec = machine.codecs[codec_text(weights.codec), False]
    return gradients, Coding(codec, True, weights.minimum_size, computed)


def calibrated(machine: Machine, name: str) -> Coding | None:
    """Return the coding of all vectors by a calibrated codec of this name: the first in
    alphabetical order, or None if there is none."""
    kinds = sorted({*machine.codecs, *machine.phased})
    for kind in kinds:
        if kind[0].partition(":")[0] == name:
            return Coding(machine.codecs.get(kind), False, 0, 4, phased=machine.phased.get(kind))
    return None


def needed(machine: Machine, strategy: CanonicalStrategy) -> Machine:
    """Return the machine without the codecs and memory operations that a strategy does not use."""
    given, weights = strategy.gradients, strategy.weights
    levels = [given.codec, *([given.between_nodes] if given.between_nodes else [])]
    used = {(codec_text(codec), given.error_feedback) for codec in levels}
    used |= {(codec_text(weights.codec), False)} if weights else set()
    moved = memory_operations(strategy)
    return machine._replace(
        codecs={kind: lines for kind, lines in machine.codecs.items() if kind in used},
        memory={name: line for name, line in machine.memory.items() if name in moved},
        phased={kind: lines for kind, lines in machine.phased.items() if kind in used},
    )
