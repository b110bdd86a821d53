"""Peak memory of a rank by the one memory formula, set right by what the start really took."""

from shardlab.search.feasible import Peak, Shapes, formula_bytes
from shardlab.search.history import History


def peak_of(history: History, shapes: Shapes) -> Peak:
    """Return the formula plus what the start's peak has beyond it, such as the interpreter."""
    start, load = history.reference, history.workload
    measured = max(each.memory_peak_bytes for each in start.measurements)
    rest = max(0, measured - formula_bytes(start.strategy, shapes, load.trained_on))
    return lambda strategy: rest + formula_bytes(strategy, shapes, load.world_size)


def predicted_peaks(history: History, shapes: Shapes) -> dict[str, int]:
    """Return peaks by hash of what was timed and has none measured on the ranks of the search."""
    peak = peak_of(history, shapes)
    return {
        key: peak(entry.strategy)
        for key, entry in history.measured.items()
        if entry.steps and history.peak(entry) is None
    }
