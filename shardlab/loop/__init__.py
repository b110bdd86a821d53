"""The training loop, and the metrics of the steps that it ran."""
