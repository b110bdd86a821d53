"""The host that a figure was measured on, and its memory."""
