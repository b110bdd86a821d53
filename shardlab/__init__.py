"""shardlab: a reproducible laboratory for sharded training of language models."""
