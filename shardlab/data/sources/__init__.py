"""Sources of text: JSON, JSON lines, MediaWiki, Hugging Face datasets, Wikipedia, synthetic."""
