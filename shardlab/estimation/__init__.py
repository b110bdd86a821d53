"""Memory of a rank before a run, traced with tensors that have shapes and no data."""
