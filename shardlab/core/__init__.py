"""Base layer: errors, validated documents, atomic files, locks, processes, progress."""
