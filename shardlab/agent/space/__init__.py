"""The space of the search: every legal strategy on a grid of settings."""
