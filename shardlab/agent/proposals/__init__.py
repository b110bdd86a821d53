"""Proposals: evidence, candidates, judge, validation."""
