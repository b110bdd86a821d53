"""The stages of the pipeline: one thin command each."""
