"""Communication between ranks: point-to-point exchange on gloo, collectives of plain values, timing."""
