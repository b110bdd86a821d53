"""Communication between ranks: point-to-point exchange, collectives of plain values, timing."""
