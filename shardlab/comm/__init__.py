"""Collectives over codecs, error feedback, the ledger, and hooks into other people's models."""
