"""Answer of the report: a line for each link that claims no more than intervals show, and what to
paste."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import yaml

from shardlab.config.attach_lines import attach_lines
from shardlab.config.strategy import CanonicalStrategy
from shardlab.core.numbers import figure, fixed, percent, plural, signed, within
from shardlab.report.aggregate import verdict
from shardlab.report.evidence import Evidence
from shardlab.report.sections.scaling import share
from shardlab.report.tables import estimate
from shardlab.report.timings import place
from shardlab.report.verdict import Choice, Verdict, verdicts
from shardlab.search.experiment import written
from shardlab.search.history import History


@dataclass(frozen=True)
class Answer:
    """First screen of the report."""

    warnings: list[str]
    """what crashed, diverged or was not raced"""
    lines: list[str]
    """verdict on each link"""
    reasons: list[str]
    """how much of a step is communication"""
    snippets: dict[str, str]
    """by title: strategies of the verdicts as text to paste"""


def answer(evidence: Evidence) -> Answer:
    """Return what failed, the verdict on each link with its reason, and the strategies to paste."""
    crashed = [evidence.crash_warning] if evidence.crash_warning else []
    found = verdicts(evidence)
    choices = [choice for each in found for choice in (each.use, each.lossless) if choice]
    kept = {each.name: each.strategy for each in choices if verdict(*_gain(each)[1:], 1) != "lower"}
    return Answer(
        warnings=[*crashed, *_failures(evidence.compared), *_not_raced(evidence.history)],
        lines=[_line(each, evidence) for each in found],
        reasons=share(evidence.main_steps, evidence.baseline),
        snippets={name: snippet(name, strategy) for name, strategy in kept.items()},
    )


def _failures(compared: pd.DataFrame) -> Iterator[str]:
    diverged = compared.loc[compared["divergence"] != "", "divergence"]
    if not diverged.empty:
        yield f"Not every run has a result: {'; '.join(f'{r} {w}' for r, w in diverged.items())}."
        return
    if not np.isfinite(compared[["val_ppl", "untrained_ppl"]]).all(axis=None):
        yield "The perplexity of at least one run is not finite."
        return
    least = compared["untrained_factor"].min()
    if least <= 1:
        yield f"At least one run failed to train: its perplexity grew {figure(1 / least)} times."


def _not_raced(history: History) -> Iterator[str]:
    for name in dict.fromkeys(decision.search for decision in history.rounds):
        rounds = [decision for decision in history.rounds if decision.search == name]
        if not any(arm.step for decision in rounds for arm in decision.compared):
            last, search = rounds[-1], f"the search {name}" if name else "the search"
            hint = " (raise agent.trial_timeout_s)" if any(d.compared for d in rounds) else ""
            yield (
                f"Nothing was raced on {plural(last.world_size, 'rank')} with link {last.link}, so "
                f"{search} adds nothing: {last.reason.removeprefix('nothing was raced: ')}{hint}."
            )


def _line(found: Verdict, evidence: Evidence) -> str:
    where, tolerance = place(found.timing), percent(evidence.tolerance, 0)
    first = found.timing.iloc[0]
    if first["world_size"] * first["threads"] > first["cores"]:
        where += f" on {plural(first['cores'], 'core')}"
    if first["disturbed"]:
        where += " (others used its CPUs meanwhile)"
    refused = ", ".join(f"{each.name} ({_loss(each)})" for each in found.refused)
    ending = f" Faster, and not recommended: {refused}; tolerance {tolerance}." if refused else ""
    if found.use is None:
        return f"{where}: no strategy can be recommended.{ending}"
    use, lossless = found.use, found.lossless
    facts = [_against(use, evidence.baseline), _loss(use), _memory(use, evidence.baseline)]
    gain, low, high = _gain(use)
    state = verdict(low, high, 1)
    if state == "lower":
        others = first["world_size"] - 1
        gives = "the second gives" if others == 1 else f"the other {others} give"
        longer = within(*estimate(use.row, "alone_ratio"), 2)
        return (
            f"{where}: train on one device: the link eats what {gives}. {_name(use)}, the fastest "
            f"that can be recommended, takes {longer} times as long for as many tokens.{ending}"
        )
    facts.insert(1, f"{within(gain, low, high, 2)} times as fast as one device alone")
    advice = f"use {_name(use)}"
    if math.isnan(gain):
        facts[1] = "not compared with one device alone, which was not timed"
    elif state == "unknown":
        facts[1] += " in the only repetition"
    elif state == "same":
        advice = f"one device alone, or {_name(use)}, which is not shown to be faster"
    without = "" if use is lossless else f"; without any loss: {_alternative(lossless)}"
    return f"{where}: {advice}: {', '.join(filter(None, facts))}{without}.{ending}"


def _name(choice: Choice) -> str:
    label = f" ({choice.strategy.label()}; timed in its race)"
    return choice.name + label * choice.searched


def _gain(choice: Choice) -> tuple[float, float, float]:
    mean, high, low = (1 / ratio for ratio in estimate(choice.row, "alone_ratio"))
    return mean, low, high


def _against(choice: Choice, baseline: str) -> str:
    mean = choice.row["step_ratio"]
    if choice.name == baseline or math.isnan(mean):
        return ""
    return f"{fixed(1 / mean, 1)} times as fast as {baseline}"


def _loss(choice: Choice) -> str:
    change, low, high = (100 * (ratio - 1) for ratio in estimate(choice.cost, "ppl_ratio"))
    if choice.lossless:
        return "without any loss"
    if math.isnan(change):
        return "perplexity not measured"
    ends = f" ({signed(low, 1)} to {signed(high, 1)})" if math.isfinite(low) else ", in one seed"
    return f"perplexity {signed(change, 1, ' %')}{ends}"


def _memory(choice: Choice, baseline: str) -> str:
    change, low, high = (mean / 1e6 for mean in estimate(choice.cost, "memory_change"))
    if choice.name == baseline or math.isnan(change):
        return ""
    ends = f" ({signed(low, 0)} to {signed(high, 0)})" if math.isfinite(low) else ""
    return f"memory per rank {signed(change, 0, ' MB')}{ends}"


def _alternative(lossless: Choice | None) -> str:
    if lossless is None:
        return "nothing was timed"
    gain, low, high = _gain(lossless)
    if math.isnan(gain):
        return lossless.name
    if verdict(low, high, 1) == "lower":
        longer = within(*estimate(lossless.row, "alone_ratio"), 2)
        return f"one device alone ({lossless.name} takes {longer} times as long)"
    return f"{lossless.name}, {within(gain, low, high, 2)} times as fast as one device alone"


def snippet(name: str, strategy: CanonicalStrategy) -> str:
    """Return a strategy as an entry of params.yaml, and as a line of Python for a script."""
    entry = yaml.safe_dump({"strategies": {name: written(strategy)}}, sort_keys=False)
    nearest = f"fully_shard, which differs in time: {strategy.engine} is of the pipeline alone"
    script = f"# in a script: {strategy.traits.in_scripts or nearest}\n"
    if lines := attach_lines(strategy):
        script += f"{lines}\n"
    return f"# in params.yaml\n{entry}{script}"
