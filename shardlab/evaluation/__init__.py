"""The saved model of a run and its perplexity."""
