"""The strategy of a run: one document of all that can be tuned, its canonical form and its hash."""
