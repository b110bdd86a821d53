"""Search as one command: its parameters, its time, its stages, and what it prints."""
