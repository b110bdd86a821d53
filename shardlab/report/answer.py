"""The answer in words: what the figures show, and what they do not."""

import math

import numpy as np
import pandas as pd

from shardlab.agent.records.history import History
from shardlab.report.aggregate import verdict
from shardlab.report.numbers import figure, fixed, plus_minus, within
from shardlab.report.search import outcome


def answer(compared: pd.DataFrame, baseline: str, history: History) -> list[str]:
    """Sentences on speed, bytes, quality and the search, from `aggregate.comparison`."""
    return [
        _speed(compared, baseline),
        _codecs(compared, baseline),
        _bytes(compared, baseline),
        _training(compared),
        outcome(history),
    ]


def _speed(compared: pd.DataFrame, baseline: str) -> str:
    name = compared["step_ms_mean"].idxmin()
    run = compared.loc[name]
    time = f"{plus_minus(run['step_ms_mean'], run['step_ms_mean_sd'])} ms per step"
    if name == baseline:
        return f"No run has a shorter mean step than the baseline {baseline} ({time})."
    times = within(run["step_ratio"], run["step_ratio_low"], run["step_ratio_high"], 2)
    text = f"{name} has the shortest step: {time}, {times} times that of the baseline {baseline}"
    judged = verdict(run["step_ratio_low"], run["step_ratio_high"], 1)
    if judged == "same":
        return f"{text}; the interval holds 1, so it is not shown to be faster."
    return f"{text}." if judged == "lower" else f"{text}, in the only seed."


def _codecs(compared: pd.DataFrame, baseline: str) -> str:
    """Whether compression shortened the step on this link, told by runs of one engine alone."""
    engine = compared.loc[baseline, "engine"]
    coded = compared[
        (compared["engine"] == engine)
        & ((compared["gradients_codec"] != "none") | (compared["weights_codec"] != "none"))
        & (compared.index != baseline)
    ]
    if coded.empty:
        return f"No {engine} run other than the baseline compresses what it sends."
    verdicts = [
        verdict(low, high, 1)
        for low, high in zip(coded["step_ratio_low"], coded["step_ratio_high"], strict=True)
    ]
    runs = f"Of {len(coded)} {engine} runs with a codec"
    if "unknown" in verdicts:
        return f"{runs} none can be judged on time by a single seed."
    return (
        f"{runs}, {verdicts.count('lower')} took a shorter step than "
        f"the baseline, {verdicts.count('higher')} a longer one and {verdicts.count('same')} "
        "cannot be told apart from it."
    )


def _bytes(compared: pd.DataFrame, baseline: str) -> str:
    name = compared["bytes_wire"].idxmin()
    run = compared.loc[name]
    text = (
        f"{name} moves least: {figure(run['bytes_wire'] / 1e6)} MB per rank and step, a ratio of "
        f"{figure(run['compression_ratio'])}"
    )
    if name == baseline:
        return f"{text}; it is the baseline."
    low, high = (100 * (run[f"ppl_ratio_{end}"] - 1) for end in ("low", "high"))
    change = 100 * (run["ppl_ratio"] - 1)
    if not math.isfinite(change):
        return f"{text}; its validation perplexity is not finite."
    near, far = sorted((abs(low), abs(high)))
    size = within(abs(change), near, far, 1, " %")
    ending = {
        "higher": f"higher than the baseline's by {size}",
        "lower": f"lower than the baseline's by {size}",
        "same": f"not shown to differ from the baseline's: {within(change, low, high, 1, ' %')}",
        "unknown": f"{fixed(change, 1)} % from the baseline's in the only seed",
    }[verdict(low, high, 0)]
    return f"{text}; its validation perplexity is {figure(run['val_ppl'], 4)}, {ending}."


def _training(compared: pd.DataFrame) -> str:
    if not np.isfinite(compared[["val_ppl", "untrained_ppl"]]).all(axis=None):
        return "Training of at least one run diverged: its perplexity is not finite."
    least, most = compared["untrained_factor"].min(), compared["untrained_factor"].max()
    if least <= 1:
        return f"At least one run did not learn: its perplexity grew {figure(1 / least)} times."
    return (
        f"Training lowered the perplexity of every run by a factor of {figure(least)} to "
        f"{figure(most)}."
    )
