"""Aim of compression: which runs send half of the bytes or fewer, and keep the perplexity."""

import math
from collections.abc import Iterator

import pandas as pd

from shardlab.core.numbers import figure, percent, signed
from shardlab.report.tables import Row

_LEAST = 2.0
"""times less traffic"""
_MOST = 0.01
"""largest upper end of the relative rise of perplexity"""
_TRAFFIC = {"Gradients": "gradients_ratio", "All traffic": "compression_ratio"}
"""compression ratio by what it is of"""


def aim(compared: pd.DataFrame, baseline: str) -> tuple[list[str], list[str]]:
    """Return what the aim is, and a line each for gradients and for all traffic: which compressed
    runs meet it, and what the others miss. Both are empty where no run is compressed.

    Args:
        compared: of `aggregate.comparison`.
    """
    codecs = compared[["gradients_codec", "weights_codec"]]
    compressed = compared[(codecs != "none").any(axis=1)].drop(baseline, errors="ignore")
    if compressed.empty:
        return [], []
    stated = (
        "The aim of compression is 2 to 4 times less traffic than in float32, or still less, where "
        f"the interval of the perplexity ends {percent(_MOST, 0)} above {baseline} at most."
    )
    rows = compressed.reset_index().to_dict("records")
    return [stated], [_line(kind, name, rows) for kind, name in _TRAFFIC.items()]


def _line(kind: str, name: str, rows: list[Row]) -> str:
    sides: dict[str, list[str]] = {"met by": []}
    # one that exchanges parameters alone has no traffic of gradients
    for row in (row for row in rows if not math.isnan(row[name])):
        missed = [*_misses(row, name)]
        key = f"not met in {' and '.join(missed)} by" if missed else "met by"
        sides.setdefault(key, []).append(f"{row['run']} ({_figures(row, name)})")
    listed = [f"{side} {', '.join(names) or 'none'}" for side, names in sides.items()]
    return f"{kind}: {'; '.join(listed)}."


def _misses(row: Row, name: str) -> Iterator[str]:
    if row[name] < _LEAST:
        yield "bytes"
    # without an interval it is not shown
    if not row["ppl_ratio_high"] <= 1 + _MOST:
        yield "perplexity"


def _figures(row: Row, name: str) -> str:
    rise = 100 * (row["ppl_ratio_high"] - 1)
    ends = f"up to {signed(rise, 1, ' %')}" if math.isfinite(rise) else "no interval"
    return f"{figure(row[name])} times, {row['divergence'] or ends}"
