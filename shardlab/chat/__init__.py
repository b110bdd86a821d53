"""Conversations with a saved model, in a terminal."""
