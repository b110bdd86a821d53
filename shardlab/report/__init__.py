"""Tables, plots and the HTML page of an experiment, made from records alone."""
