"""Our own sharding: one flat vector per unit, gathered before use, reduced during backward."""
