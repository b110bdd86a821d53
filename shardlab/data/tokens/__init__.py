"""Token shards as training reads them: manifest, memory-mapped tokens, data order."""
