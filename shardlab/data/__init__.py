"""Text and tokens: sources, the corpus file, the split, tokenizers, token shards, data order."""
