"""Policies of a search, and their replay on tables of strategies that were all timed."""
