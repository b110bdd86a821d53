"""Units: what a strategy makes of a model, and its sizes."""
