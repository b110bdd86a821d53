"""The memory model: closed forms of the memory of a rank, per engine."""
