"""Calibrations: costs of single operations, as documents."""
