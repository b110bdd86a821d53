"""Numbers as a person reads them: few digits, one style everywhere."""

import math

ABSENT = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
NOT_FINITE = "not finite"
_RATES = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))


def figure(value: float, digits: int = 3) -> str:
    """`value` to so many significant digits, thousands separated, without an exponent."""
    return fixed(value, decimals(value, digits))


def fixed(value: float, places: int) -> str:
    """`value` with so many decimals; `not finite` for a run that diverged."""
    if not math.isfinite(value):
        return NOT_FINITE
    text = f"{value:,.{places}f}"
    return (
        text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", _MINUS)
    )


def decimals(value: float, digits: int) -> int:
    """Decimals that show so many significant digits of `value`."""
    if not math.isfinite(value) or value == 0:
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def optional(value: float, digits: int = 3) -> str:
    """A measure that not every run has."""
    return ABSENT if math.isnan(value) else figure(value, digits)


def scientific(value: float) -> str:
    """A very small number, to one digit."""
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}".replace("-", _MINUS)


def plus_minus(mean: float, deviation: float, digits: int = 3) -> str:
    """Mean and standard deviation to the same decimals; the mean alone for a single seed."""
    if not math.isfinite(deviation):
        return figure(mean, digits)
    places = max(decimals(mean, digits), decimals(deviation, 1) if deviation else 0)
    return f"{fixed(mean, places)} ± {fixed(deviation, places)}"


def within(mean: float, low: float, high: float, places: int, unit: str = "") -> str:
    """A mean with its interval; the mean alone for a single seed."""
    text = fixed(mean, places) + (unit if math.isfinite(mean) else "")
    if not (math.isfinite(low) and math.isfinite(high)):
        return text
    return f"{text} ({fixed(low, places)} to {fixed(high, places)})"


def percent(share: float, places: int = 1) -> str:
    """A share between 0 and 1."""
    return f"{fixed(100 * share, places)} %" if math.isfinite(share) else NOT_FINITE


def rate_text(bits_per_second: float) -> str:
    """`1 Gbit/s`."""
    size, unit = next((each for each in _RATES if bits_per_second >= each[0]), _RATES[-1])
    text = figure(bits_per_second / size)
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
