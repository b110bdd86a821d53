"""Collectives over codecs, error feedback, hooks into other people's models, ledger and links."""
