"""Answer of the report: a line for each link that claims no more than intervals show, and what to
paste."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pandas as pd

from shardlab.choose.history import History
from shardlab.core.numbers import figure, fixed, number, percent, plural, signed, within
from shardlab.report.evidence import Evidence
from shardlab.report.sections.scaling import share
from shardlab.report.sections.time_to_loss import not_reached, use_line
from shardlab.report.tables import estimate
from shardlab.report.timings import location
from shardlab.report.verdict import Choice, LinkVerdict, verdicts
from shardlab.results.interval import Ratio
from shardlab.strategy.document import CanonicalStrategy, parse_strategy
from shardlab.strategy.sync import ENOUGH_EXCHANGES

_BRACKETS = (
    "Brackets of times are of the repetitions of one timing, or from the least to the largest end "
    "of several: another run of this experiment may lie outside. Repetitions of timings of other "
    "lengths are paired in blocks. Races of the search do not time one device: there it is taken "
    "from the timing. Brackets of perplexity and memory are of the seeds."
)


@dataclass(frozen=True)
class Answer:
    """First screen of the report."""

    warnings: list[str]
    """what reached no loss, crashed, diverged or was not raced"""
    lines: list[str]
    """verdict on each link"""
    reasons: list[str]
    """how much of a step is communication, and what the verdict does not show"""
    snippets: dict[str, str]
    """by title: strategies of the verdicts as text to paste"""


def answer(evidence: Evidence) -> Answer:
    """Return what failed, the verdict on each link with its reason and what it does not show, and
    the strategies to paste."""
    crashed = [evidence.crash_warning] if evidence.crash_warning else []
    # where the time to a loss was measured, steps for as many tokens are no answer
    by_loss = evidence.by_loss
    answered = {timing for comparison in by_loss for timing in comparison.link.timings}
    answers = [link for link in verdicts(evidence) if link.timing["timing"].iloc[0] not in answered]
    firsts = [comparison.order[0] for comparison in by_loss]
    pays = {way.title: way.strategy.canonical() for way in firsts if way.ranks > 1}
    pays |= {
        choice.name: choice.strategy
        for link in answers
        for choice in (link.use, link.lossless)
        if choice and choice.name not in link.beaten
    }
    return Answer(
        warnings=[
            *not_reached(evidence.tuned),
            *crashed,
            *_failures(evidence.compared),
            *(_not_raced(evidence.history) if evidence.is_searched else ()),
        ],
        lines=[*map(use_line, by_loss), *(_line(link, evidence) for link in answers)],
        reasons=[
            *share(evidence.main_steps, evidence.baseline),
            _BRACKETS,
            *_rare_synchronisation(evidence),
        ],
        snippets={name: snippet(name, strategy) for name, strategy in pays.items()},
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


def _rare_synchronisation(evidence: Evidence) -> Iterator[str]:
    searched = (row.trained for row in evidence.history.measured.values())
    records = [*evidence.records, *chain.from_iterable(searched)]
    syncs = [(record, parse_strategy(record.strategy).sync) for record in records]
    counts = [sync.exchanges(record.steps) for record, sync in syncs if sync]
    most, longest = max(counts, default=ENOUGH_EXCHANGES), max(record.steps for record in records)
    if most < ENOUGH_EXCHANGES:
        yield (
            f"Too few parameter synchronisations ({most} in {plural(longest, 'step')}) to judge "
            "`sync`: experiments/islands of shardlab's repository compares it in longer runs."
        )


def _line(link: LinkVerdict, evidence: Evidence) -> str:
    where, tolerance = _where(link, evidence), percent(evidence.tolerance, 0)
    refused = ", ".join(f"{choice.name} ({_loss(choice)})" for choice in link.refused)
    ending = f" Faster, and not recommended: {refused}; tolerance {tolerance}." if refused else ""
    if link.use is None:
        if link.alone:
            return f"{where}: train on one device: nothing on several can be recommended.{ending}"
        return f"{where}: no strategy can be recommended.{ending.replace('Faster, and not', 'Not')}"
    if link.same:
        ending = f" Not told apart from it: {', '.join(c.name for c in link.same)}.{ending}"
    use, lossless = link.use, link.lossless
    facts = [_against(use, evidence.baseline), _loss(use), _memory(use, evidence.baseline)]
    gain = _gain(use)
    if use.name in link.beaten:
        others = link.timing["world_size"].iloc[0] - 1
        gives = "the second gives" if others == 1 else f"the other {others} give"
        longer = within(*use.ratio("alone_ratio"), 2)
        return (
            f"{where}: train on one device: the link eats what {gives}. {_name(use)}, the fastest "
            f"that can be recommended, takes {longer} times as long for as many tokens.{ending}"
        )
    facts.insert(1, f"{within(*gain, 2)} times as fast as one device alone")
    advice = f"use {_name(use)}"
    if math.isnan(gain.ratio):
        shared = link.timing["shares_cores"].iloc[0]
        why = "the ranks share cores" if shared else "not timed in the same turns"
        facts[1] = f"not compared with one device alone ({why})"
    elif math.isnan(gain.high):
        facts[1] += ", without an interval"
    if link.alone:
        advice = f"one device alone, or {_name(use)}, which is not shown to be faster"
    without = "" if use is lossless else f"; without any loss: {_alternative(link)}"
    return f"{where}: {advice}: {', '.join(filter(None, facts))}{without}.{ending}"


def _where(link: LinkVerdict, evidence: Evidence) -> str:
    """Return the ranks and the link, and what the verdict holds for: model, tokens and ratio."""
    where, first = location(link.timing), link.timing.iloc[0]
    if first["shares_cores"]:
        where += f" on {plural(first['cores'], 'core')}"
    run = next(run for run in evidence.timed if run.timing == first["timing"])
    tokens = run.tokens_of_rank
    ratio = figure(link.sync_ratio, 2)
    if math.isnan(link.sync_ratio):
        ratio = "unknown, as stock DDP was not timed"
    where += (
        f" ({run.model}, {number(run.parameters)} parameters, {tokens:,} tokens per rank and step, "
        f"synchronisation / computation {ratio})"
    )
    return where + " (others used its CPUs meanwhile)" * bool(first["disturbed"])


def _name(choice: Choice) -> str:
    timings = len(choice.rows)
    if choice.searched:
        return f"{choice.name} ({choice.strategy.label()}; timed in {plural(timings, 'race')})"
    races = f" (timed here and in {plural(timings - 1, 'race')})"
    return choice.name + races * (timings > 1)


def _gain(choice: Choice) -> Ratio:
    return choice.ratio("alone_ratio").inverse


def _against(choice: Choice, baseline: str) -> str:
    mean = choice.ratio("step_ratio").ratio
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


def _alternative(link: LinkVerdict) -> str:
    lossless = link.lossless
    if lossless is None:
        return "nothing was timed"
    gain = _gain(lossless)
    if math.isnan(gain.ratio):
        return lossless.name
    if lossless.name in link.beaten:
        longer = within(*lossless.ratio("alone_ratio"), 2)
        return f"one device alone ({lossless.name} takes {longer} times as long)"
    return f"{lossless.name}, {within(*gain, 2)} times as fast as one device alone"


def snippet(name: str, strategy: CanonicalStrategy) -> str:
    """Return a strategy as an entry of params.yaml, and as a line of Python for a script."""
    nearest = f"fully_shard, which differs in time: {strategy.engine} is of the pipeline alone"
    script = f"# in a script: {strategy.traits.in_scripts or nearest}\n"
    if strategy.traits.residency == "streamed":
        script += f"sliding = shardlab.SlideFSDP(model, {strategy.written()!r})\n"
    elif lines := strategy.attach_call():
        script += f"{lines}\n"
    return f"# in params.yaml\n{strategy.entry(name)}\n{script}"
