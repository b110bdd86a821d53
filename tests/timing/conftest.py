"""Fixtures of the races."""

from tests.timing.faulty_arms import faulty

__all__ = ["faulty"]
