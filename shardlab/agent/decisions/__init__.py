"""Trials, and the decision to accept or to roll back."""
