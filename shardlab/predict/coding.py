"""Encodings and routes of the messages of a strategy, with the fitted costs of their codecs."""

from collections.abc import Mapping
from typing import NamedTuple

from shardlab.predict.machine import CodecLines, Machine, PhasedLines
from shardlab.results.calibration_record import PhasedOperation
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.document import CanonicalStrategy
from shardlab.strategy.sync import MINIMUM_SIZE


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
"""of the number that gradient clipping sums over ranks, as of all uncompressed float32"""


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
        key = codec_text(codec), gradients.error_feedback
        uncompressed = Coding(None, gradients.route == "native", gradients.minimum_size, reduced)
        if codec.name == "none":
            return uncompressed
        if codec.multi_phase:
            return uncompressed._replace(phased=machine.phased[key])
        return uncompressed._replace(codec=machine.codecs[key], summable=codec.summable)

    other = gradients.between_nodes
    between = None if other is None else coding(other)
    levels = Levels(coding(gradients.codec), between, gradients.ranks_per_node)
    computed = 4 if strategy.param_dtype in ("auto", "fp32") else 2
    if weights is None:
        return levels, NORM._replace(element_bytes=computed)
    codec = machine.codecs[codec_text(weights.codec), False]
    return levels, Coding(codec, True, weights.minimum_size, computed)


def outer_coding(strategy: CanonicalStrategy, machine: Machine) -> Coding | None:
    """Return the coding of what copies of the model exchange; None where they do so in every step.

    Raises:
        KeyError: a codec that was not calibrated.
    """
    sync = strategy.sync
    if sync is None:
        return None
    if sync.codec.name == "none":
        return NORM
    codec = machine.codecs[codec_text(sync.codec), sync.error_feedback]
    return Coding(codec, False, MINIMUM_SIZE, 4, sync.codec.summable)
