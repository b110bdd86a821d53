"""Tests; a package, or one of this name that a dependency installs would hide it."""
