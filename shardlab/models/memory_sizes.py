"""Sizes of a model and a step on which memory depends, besides the strategy."""

from typing import NamedTuple

Categories = dict[str, int]
"""bytes by category: parameters, gradients, moments, residuals, gathered, communication,
activations, logits, accumulated"""


class UnitShape(NamedTuple):
    """Size of a unit, which is gathered in one collective."""

    elements: int
    trained: int
    """number of elements that are trained"""
    kept: bool
    """gathered parameters stay between forward and backward"""
    element_bytes: int
    """of an element that computes"""


class Sizes(NamedTuple):
    """Sizes of a model and of a rank's step."""

    parameters: int
    trained: int
    """number of parameters that are trained"""
    units: tuple[UnitShape, ...]
    """all but the root"""
    element_bytes: int
    """of an element of the root that computes"""
    checkpointing: tuple[str, ...] = ()
    """of every block"""
    width: int = 0
    """elements per token between blocks"""
    queries: int = 0
    """elements per token"""
    keys: int = 0
    """elements per token; there are as many of the values"""
    feed_forward: int = 0
    """elements per token"""
    wide: int = 0
    """number of tensors of the feed-forward width that backward needs"""
    vocabulary: int = 0
    tokens: int = 0
    """of a micro-batch of one rank"""
    accumulation: int = 1
    """number of micro-batches of a step"""
    holding: bool = True
    """gradients wait until the norm of all of them is known"""

    @property
    def root(self) -> int:
        """Number of elements that belong to no unit."""
        return self.parameters - sum(unit.elements for unit in self.units)

    @property
    def trained_root(self) -> int:
        """Number of elements of the root that are trained."""
        return self.trained - sum(unit.trained for unit in self.units)

    def trained_units(self) -> list[int]:
        """Return the trained elements of each unit that has some."""
        return [unit.trained for unit in self.units if unit.trained]
