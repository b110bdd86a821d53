"""The corpus file and its documents."""
