"""Timings of the parameters, with those that are interleaved with them."""

from collections.abc import Mapping

from shardlab.results.settings import Repetitions, Timing


def parts(timing: Timing, name: str) -> dict[str, Repetitions]:
    """Return a timing and the timings interleaved with it, by name: first the timing, then the
    interleaved ones sorted by name, since their order in the file has no meaning.

    Args:
        name: name of the timing.
    """
    first = Repetitions(**{key: getattr(timing, key) for key in Repetitions.model_fields})
    interleaved = {part: timing.interleaved[part] for part in sorted(timing.interleaved)}
    return {name: first, **interleaved}


def each_timing(timings: Mapping[str, Timing]) -> dict[str, Repetitions]:
    """Return all timings by name, including interleaved ones."""
    return {name: part for key in timings for name, part in parts(timings[key], key).items()}


def turns(timings: Mapping[str, Timing]) -> dict[str, str]:
    """Return the timing of the parameters that each timing is interleaved in, by name."""
    return {part: name for name in timings for part in parts(timings[name], name)}
