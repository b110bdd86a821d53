"""Parts of the engines that schedule their collectives: hooks of units, vectors in flight."""
