"""The parameters of an experiment: what params.yaml may hold, read, checked and joined."""
