"""Float vector to byte payload and back; one file per family, found by name in the registry."""
