"""Inputs of checkpointed blocks outside of the device, in main memory or in a file."""
