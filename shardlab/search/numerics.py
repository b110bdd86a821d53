"""Numerics of a strategy, on which losses depend: its codecs and its types.

Quality does not depend on the link, and hardly on how a model is sharded, so that what was measured
with one strategy says something of every other with the same numerics.
"""

from typing import NamedTuple

from shardlab.config.compression import gradient_words, weight_words
from shardlab.config.strategy import CanonicalStrategy


class Numerics(NamedTuple):
    """Settings of a canonical strategy that its losses depend on."""

    gradients: str
    """codec with its options; empty: none"""
    weights: str
    types: str
    """of computation, reduction and stored moments"""
    flat: bool
    """codecs see flat vectors of whole units, and not single parameters"""

    @classmethod
    def of(cls, strategy: CanonicalStrategy) -> "Numerics":
        """Return the numerics of a strategy; equal where only sharding and schedule differ."""
        given, weights = strategy.gradients, strategy.weights
        words = "" if given.plain() else ", ".join(gradient_words(given))
        narrow = [each.param_dtype for each in strategy.overrides if each.param_dtype]
        types = strategy.param_dtype, strategy.reduce_dtype, strategy.moment_dtype, *narrow
        coded = weight_words(weights) if weights else ""
        flat = bool(words or coded) and strategy.traits.flat_gradients
        return cls(words, coded, " ".join(types), flat)

    @property
    def lossless(self) -> bool:
        """Return whether nothing is compressed on the wire."""
        return not (self.gradients or self.weights)

    def alike(self, other: "Numerics") -> bool:
        """Return whether only the vectors differ that codecs see."""
        return self[:3] == other[:3]

    def includes(self, other: "Numerics") -> bool:
        """Return whether the other compresses a part of what this does, in the same way."""
        return (
            other.types == self.types
            and not other.lossless
            and other.gradients in ("", self.gradients)
            and other.weights in ("", self.weights)
        )
