"""The strategy document: settings, codec specifications, canonical form, hash, validation."""
