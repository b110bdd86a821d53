"""The contract of an engine and what several engines share."""
