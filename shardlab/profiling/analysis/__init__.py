"""Interval arithmetic of traces: compute, communication, overlap, idle, skew."""
