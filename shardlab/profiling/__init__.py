"""Profiles of a step: capturing traces, joining those of all ranks, measuring them."""
