"""Sizes of a block of a model, on which its memory and its operations depend."""

from typing import NamedTuple


class BlockShape(NamedTuple):
    """Sizes of a block: elements per token."""

    queries: int = 0
    attended: int = 0
    """of what attention returns, before the last product"""
    keys: int = 0
    values: int = 0
    window: int | None = None
    """number of tokens that a query sees at most; None: all"""
    heads: int = 0
    """of attention that stores its matrix; 0 where it is fused"""
    feed_forward: int = 0
    expanded: int = 0
    """of the products into the feed-forward network, with a gate twice its width"""
    wide: int = 0
    """of the feed-forward network that backward needs"""
    normalised: int = 0
    """of normalisations and dropout that backward needs"""

    def products(self, sequence_length: int) -> int:
        """Return the multiplications of queries and of values for a token, in forward; causal
        attention counts in full."""
        seen = sequence_length if self.window is None else min(self.window, sequence_length)
        return (self.queries + self.attended) * seen
