"""The choice of a strategy: evidence, candidates, judge, race and decision of the search.

It reads results and writes strategies. It neither trains nor imports torch: the stage of a
trial passes the function that measures.
"""
