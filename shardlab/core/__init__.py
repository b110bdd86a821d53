"""Base layer: errors, files, locks, log, host and devices."""
