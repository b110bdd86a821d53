"""Streams, events and page-locked memory of devices."""
