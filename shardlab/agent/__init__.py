"""The search for a better strategy: evidence, candidates, judge, validator, trial, decision.

It reads records and writes strategies. It neither trains nor imports torch: whoever runs a trial
hands in the function that measures.
"""
