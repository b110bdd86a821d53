"""Replays of policies: their documents and figures."""
