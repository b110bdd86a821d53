"""Fixtures of the races."""

from tests.train.faulty_arms import faulty

__all__ = ["faulty"]
