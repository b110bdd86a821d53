"""Engines: one contract for every way to train a model on several ranks; parts that serve alone."""
