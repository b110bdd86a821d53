"""Base layer: errors, validated documents, atomic files, processes, progress."""
