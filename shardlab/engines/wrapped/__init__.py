"""Engines around torch's own wrappers: DDP, FSDP1, FSDP2."""
