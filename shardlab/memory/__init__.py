"""The memory model: bytes of a rank in a training step, in closed form."""
