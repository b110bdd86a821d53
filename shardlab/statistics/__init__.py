"""Confidence intervals, and time to quality from a loss curve."""
