"""Timings of the parameters, with those that are interleaved with them."""

from collections.abc import Mapping

from shardlab.results.settings import Repetitions, Timing


def parts(timing: Timing, name: str) -> dict[str, Repetitions]:
    """Return a timing of this name and all that are interleaved with it, by name, itself first; the
    order of the others in the file has no meaning."""
    alone = Repetitions(**{key: getattr(timing, key) for key in Repetitions.model_fields})
    others = {other: timing.interleaved[other] for other in sorted(timing.interleaved)}
    return {name: alone, **others}


def each_timing(timings: Mapping[str, Timing]) -> dict[str, Repetitions]:
    """Return all timings by name, those that are interleaved with others among them."""
    return {name: part for key in timings for name, part in parts(timings[key], key).items()}


def turns(timings: Mapping[str, Timing]) -> dict[str, str]:
    """Return by name of each timing the one that holds it, whose turns it takes."""
    return {part: name for name in timings for part in parts(timings[name], name)}
