"""The decision on a trial: accept or roll back."""
