"""Sharding by hand: one flat vector per unit, gathered before use, reduced behind the backward."""
