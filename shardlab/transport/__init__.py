"""Bytes between ranks: point-to-point exchange on gloo, emulated links, traffic counters."""
