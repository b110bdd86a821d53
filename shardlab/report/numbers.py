"""Numbers as text: few digits, one style everywhere; and the cells of tables that show them.

Cell helpers read the column `name` of a row, a row of `aggregate.comparison` or of another table.
Those for numbers share one signature: `digits` significant digits of the value times `scale`.
"""

import math
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Cell = Callable[[Row], str]

MB = 1e-6
KB = 1e-3

ABSENT = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
NOT_FINITE, INFINITE = "not finite", "infinite"
DISTURBED = "\N{DAGGER}"
_RATES = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))


def figure(value: float, digits: int = 3) -> str:
    """Format to `digits` significant digits, thousands separated, without an exponent."""
    return fixed(value, decimals(value, digits))


def fixed(value: float, places: int) -> str:
    """Format with `places` decimals; `not finite` for a run that diverged."""
    if value == math.inf:
        return INFINITE
    if not math.isfinite(value):
        return NOT_FINITE
    text = f"{value:,.{places}f}"
    return (
        text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", _MINUS)
    )


def decimals(value: float, digits: int) -> int:
    """Return the number of decimals that show `digits` significant digits of `value`."""
    if not math.isfinite(value) or value == 0:
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def optional(value: float, digits: int = 3) -> str:
    """Format like `figure`, or as a dash where the value is NaN: the run has no such measure."""
    return ABSENT if math.isnan(value) else figure(value, digits)


def scientific(value: float) -> str:
    """Format a very small number to one digit with an exponent."""
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}".replace("-", _MINUS)


def plus_minus(mean: float, deviation: float, digits: int = 3) -> str:
    """Format mean ± standard deviation with equal decimals; the mean alone for a single value."""
    if not math.isfinite(deviation):
        return figure(mean, digits)
    places = max(decimals(mean, digits), decimals(deviation, 1) if deviation else 0)
    return f"{fixed(mean, places)} ± {fixed(deviation, places)}"


def within(mean: float, low: float, high: float, places: int, unit: str = "") -> str:
    """Format a mean with its interval in brackets; the mean alone for a single value."""
    text = fixed(mean, places) + (unit if math.isfinite(mean) else "")
    if not (math.isfinite(low) and math.isfinite(high)):
        return text
    return f"{text} ({fixed(low, places)} to {fixed(high, places)})"


def ratio(mean: float, low: float, high: float, *, places: int) -> str:
    """Format a ratio with its interval; 1 alone for the reference itself, a dash for NaN."""
    if math.isnan(mean):
        return ABSENT
    return "1" if mean == low == high == 1 else within(mean, low, high, places)


def percent(fraction: float, places: int = 1) -> str:
    """Format a fraction between 0 and 1 in percent."""
    return f"{fixed(100 * fraction, places)} %" if math.isfinite(fraction) else NOT_FINITE


def rate_text(bits_per_second: float) -> str:
    """Format a rate with its unit, as in `1 Gbit/s`."""
    size, unit = next((each for each in _RATES if bits_per_second >= each[0]), _RATES[-1])
    text = figure(bits_per_second / size)
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, as in `2 seeds`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def plain(name: str, digits: int = 3, scale: float = 1) -> Cell:
    """Show a measure that every run has; NaN means that the run diverged."""
    return lambda row: figure(row[name] * scale, digits)


def or_divergence(cell: Cell) -> Cell:
    """Show at which step a run diverged in place of its quality."""
    return lambda row: row["divergence"] or cell(row)


def or_disturbed(cell: Cell, name: str = "disturbed") -> Cell:
    """Mark a time during which others used the CPUs of the ranks, as column `name` says."""
    return lambda row: f"{cell(row)} {DISTURBED}" if row[name] else cell(row)


def where_known(name: str, digits: int = 3, scale: float = 1) -> Cell:
    """Show a measure that not every run has; NaN is a dash."""
    return lambda row: optional(row[name] * scale, digits)


def spread(name: str, digits: int = 3, scale: float = 1) -> Cell:
    """Show a measure ± its standard deviation, which is in the column `NAME_sd`."""
    return lambda row: plus_minus(row[name] * scale, row[f"{name}_sd"] * scale, digits)


def share(name: str, places: int = 1) -> Cell:
    """Show a fraction between 0 and 1 in percent with so many decimals; NaN is a dash."""
    return lambda row: ABSENT if math.isnan(row[name]) else fixed(100 * row[name], places)


def interval(name: str, places: int = 2) -> Cell:
    """Show a ratio with the interval `NAME_low` to `NAME_high`; 1 alone for the reference."""

    return lambda row: ratio(*(row[f"{name}{end}"] for end in ("", "_low", "_high")), places=places)


def words(name: str) -> Cell:
    """Show a value as text."""
    return lambda row: str(row[name])
