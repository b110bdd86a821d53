"""Tokenizers, the split, and the parallel build of token shards."""
