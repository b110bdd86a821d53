"""Emulation of network links between the ranks of one machine."""
