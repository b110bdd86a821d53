"""Measured costs of single operations, apart from any training run."""
