"""Documents: parameters of an experiment, strategies, and the records that runs leave behind."""
