"""Profiles of training steps: capture, merge and breakdown of traces."""
