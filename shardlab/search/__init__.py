"""The search for a better strategy: evidence, candidates, judge, validator, race, decision.

It reads records and writes strategies. It neither trains nor imports torch: the stage of a
trial passes the function that measures.
"""
