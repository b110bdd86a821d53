"""Timings and calibrations as documents, and statistics of them."""
