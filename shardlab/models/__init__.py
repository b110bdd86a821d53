"""Models to train: presets, Hugging Face causal language models, their units and their memory."""
