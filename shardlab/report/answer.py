"""Answer of the report in a few sentences, which claim no more than the intervals show."""

import math

import numpy as np
import pandas as pd

from shardlab.report.aggregate import verdict
from shardlab.report.evidence import Evidence
from shardlab.report.sections.links import fastest
from shardlab.report.sections.scaling import bottleneck_of
from shardlab.report.sections.search import outcome
from shardlab.report.tables import estimate, figure, fixed, plus_minus, within


def answer(evidence: Evidence) -> list[str]:
    """Return sentences on what crashed, on speed, links, bytes, quality, the search, and the
    bottleneck."""
    compared, baseline = evidence.compared, evidence.baseline
    crashed = [evidence.crash_warning] if evidence.crash_warning else []
    trained = compared[compared["divergence"] == ""]
    if baseline not in trained.index:
        return [*crashed, _training(compared), outcome(evidence.history)]
    setting = next(record for record in evidence.records if record.run == baseline)
    return [
        *crashed,
        _speed(trained, baseline),
        *(fastest(group, baseline) for group in evidence.crossovers),
        _bytes(trained, baseline),
        _training(compared),
        outcome(evidence.history),
        bottleneck_of(evidence.timing_rows, setting),
    ]


def _speed(compared: pd.DataFrame, baseline: str) -> str:
    # by the paired ratio: a mean of step times also has the drift of the machine
    name = compared["step_ratio"].idxmin()
    run = compared.loc[name]
    time = f"{plus_minus(run['step_ms'], run['step_ms_sd'])} ms per step"
    if name == baseline:
        return f"No run has a shorter step than the baseline {baseline} ({time})."
    ratio, low, high = estimate(run, "step_ratio")
    times = within(ratio, low, high, 2)
    ending = {
        "same": "; the interval contains 1, so it is not shown to be faster.",
        "unknown": ", in the only repetition.",
    }.get(verdict(low, high, 1), ".")
    return (
        f"{name} has the shortest step: {time}, {times} times that of the baseline "
        f"{baseline}{ending}"
    )


def _bytes(compared: pd.DataFrame, baseline: str) -> str:
    name = compared["bytes_wire"].idxmin()
    run = compared.loc[name]
    text = (
        f"{name} sends the fewest bytes: {figure(run['bytes_wire'] / 1e6)} MB per rank and step, a "
        f"compression ratio of {figure(run['compression_ratio'])}"
    )
    if name == baseline:
        return f"{text}; it is the baseline."
    change, low, high = (100 * (ratio - 1) for ratio in estimate(run, "ppl_ratio"))
    if not math.isfinite(change):
        return f"{text}; its validation perplexity is not finite."
    size = within(abs(change), min(abs(low), abs(high)), max(abs(low), abs(high)), 1, " %")
    ending = {
        "higher": f"higher than the baseline's by {size}",
        "lower": f"lower than the baseline's by {size}",
        "same": f"not shown to differ from the baseline's: {within(change, low, high, 1, ' %')}",
        "unknown": f"{fixed(change, 1)} % from the baseline's in the only seed",
    }[verdict(low, high, 0)]
    return f"{text}; its validation perplexity is {figure(run['val_ppl'], 4)}, {ending}."


def _training(compared: pd.DataFrame) -> str:
    diverged = compared.loc[compared["divergence"] != "", "divergence"]
    if not diverged.empty:
        runs = "; ".join(f"{run} {words}" for run, words in diverged.items())
        return f"Not every run has a result: {runs}."
    if not np.isfinite(compared[["val_ppl", "untrained_ppl"]]).all(axis=None):
        return "The perplexity of at least one run is not finite."
    least, most = compared["untrained_factor"].min(), compared["untrained_factor"].max()
    if least <= 1:
        return f"At least one run failed to train: its perplexity grew {figure(1 / least)} times."
    return (
        f"Training lowered the perplexity of every run by a factor of {figure(least)} to "
        f"{figure(most)}."
    )
