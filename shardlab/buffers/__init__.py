"""Sizes of the buffers that an engine allocates."""
