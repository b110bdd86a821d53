"""Interleaved steps of several strategies: times that compare in pairs."""
