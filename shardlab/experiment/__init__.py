"""The experiment: the schema of params.yaml and the parameters that a stage reads."""
