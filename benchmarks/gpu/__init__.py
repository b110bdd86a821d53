"""Proof and figures of a GPU, in parts that are commands with time limits.

`parts.py` lists them, `__main__.py` runs them. Parts of correctness are tests of `tests/gpu`, which
run on a CPU, too; parts with figures are the modules beside this one. They append rows to one file,
of which `figures.py` makes a page.
"""
