"""Models to train: presets with random weights, and Hugging Face causal language models."""
