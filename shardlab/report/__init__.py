"""What a person sees: tables, plots and the HTML page, made from records alone."""
