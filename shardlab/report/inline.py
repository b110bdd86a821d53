"""Plots as a part of the page: they take its colours, and the page can hide a run in them."""

import re

_COLOURS = {"#000000": "currentColor", "#ffffff": "var(--page)", "#e3e3e3": "var(--line)"}
"""text and baseline, background, grid"""


def inline(svg: str, name: str) -> str:
    """Return an SVG of matplotlib, which escapes the texts in it, as an element of the page.

    Identifiers begin with `name`, since all plots share the page. Artists of a run, `run:NAME`, and
    its name in the legend, `legend:NAME`, have data attributes instead.
    """
    svg = svg[max(svg.find("<svg"), 0) :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="(run|legend):', r' data-\1="', svg)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", svg)
    for colour, themed in _COLOURS.items():
        svg = svg.replace(colour, themed)
    return svg
