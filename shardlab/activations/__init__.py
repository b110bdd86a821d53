"""Inputs of checkpointed blocks, off-loaded to host memory or to a file."""
