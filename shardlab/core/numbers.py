"""Numbers, with units and nouns, as text."""

import math

ABSENT = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
INFINITE = "infinite"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def figure(value: float | None, digits: int = 3) -> str:
    """Format with `digits` significant digits and separated thousands, without an exponent."""
    return ABSENT if value is None else fixed(value, decimals(value, digits))


def fixed(value: float, decimal_places: int) -> str:
    """Format with `decimal_places`; a dash for NaN, `infinite` for infinity."""
    if not math.isfinite(value):
        return ABSENT if math.isnan(value) else INFINITE
    text = f"{value:,.{decimal_places}f}"
    is_zero = float(text.replace(",", "")) == 0
    return text.removeprefix("-") if is_zero else text.replace("-", _MINUS)


def decimals(value: float, digits: int) -> int:
    """Return the number of decimals that show `digits` significant digits of `value`."""
    if not math.isfinite(value) or value == 0:
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def scientific(value: float) -> str:
    """Format a very small number to one digit with an exponent."""
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}".replace("-", _MINUS)


def plus_minus(mean: float, deviation: float, digits: int = 3) -> str:
    """Format mean ± standard deviation with equal decimals; the mean if there is no deviation."""
    if not math.isfinite(deviation):
        return figure(mean, digits)
    decimal_places = max(decimals(mean, digits), decimals(deviation, 1) if deviation else 0)
    return f"{fixed(mean, decimal_places)} ± {fixed(deviation, decimal_places)}"


def within(mean: float, low: float, high: float, decimal_places: int, unit: str = "") -> str:
    """Format a mean with its interval in brackets, or the mean if there is no interval."""
    text = fixed(mean, decimal_places) + (unit if math.isfinite(mean) else "")
    ends = fixed(low, decimal_places), fixed(high, decimal_places)
    if ends[0] == ends[1] or not (math.isfinite(low) and math.isfinite(high)):
        return text
    return f"{text} ({ends[0]} to {ends[1]})"


def percent(fraction: float | None, decimal_places: int = 1) -> str:
    """Format a fraction between 0 and 1 in percent."""
    if fraction is None or not math.isfinite(fraction):
        return figure(fraction)
    return f"{fixed(100 * fraction, decimal_places)} %"


def number(value: float, unit: str = "") -> str:
    """Format to three digits with a prefix of the unit, as in `8.03 G` or `1 Gbit/s`."""
    shown = float(f"{value:.3g}")
    prefixes = ((size, prefix) for size, prefix in _PREFIXES if shown >= size)
    size, prefix = next(prefixes, _PREFIXES[-1])
    return f"{_trimmed(figure(value / size))} {prefix}{unit}".rstrip()


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, as in `2 seeds`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def signed(value: float, decimal_places: int, unit: str = "") -> str:
    """Format a difference with its sign."""
    return f"{'+' if value > 0 else ''}{fixed(value, decimal_places)}{unit}"


def rough(value: float) -> str:
    """Format to two digits, without an exponent."""
    shown = float(f"{value:.2g}")
    return _trimmed(f"{shown:.{decimals(shown, 2)}f}")


def _trimmed(text: str) -> str:
    """Remove zeros at the end of decimals."""
    return text.rstrip("0").rstrip(".") if "." in text else text
