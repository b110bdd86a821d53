"""Inputs of checkpointed blocks outside of the device, in host memory or in a file."""
