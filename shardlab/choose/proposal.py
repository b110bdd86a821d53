"""Proposal of a round: evidence, shortlist by prediction, verdict, and the arms of the race.

Steps are predicted by the forecast, memory by formula, quality by earlier runs. Many strategies of
a grid lie within the error of a prediction: its shortlist has the best of each class, an engine
with a kind of codec, and one strategy of unknown quality, or two where one of them has `sync`.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardlab.choose.actions import Offer, actions
from shardlab.choose.evidence import describe
from shardlab.choose.facts import Facts
from shardlab.choose.history import History, PerplexityRatio, reason_to_stop
from shardlab.choose.judge import Judge, Question
from shardlab.choose.rank import MARGIN, is_tolerated
from shardlab.choose.records import (
    Candidate,
    Narrowing,
    Prediction,
    Proposal,
    Role,
    TrialSettings,
    Verdict,
)
from shardlab.choose.settings import Agent
from shardlab.choose.space import Feasible, Peak, feasible, peak_of, peaks_of, settled
from shardlab.core.errors import UserError
from shardlab.core.link import Link
from shardlab.predict.machine import fit_machine
from shardlab.predict.model import Estimate, Workload, fit_model, strategy_of, unpredictable
from shardlab.predict.settings import Space
from shardlab.results.calibration_record import Calibration
from shardlab.results.timing_result import TimingResult
from shardlab.strategy.document import CanonicalStrategy
from shardlab.strategy.validation import check_fits

if TYPE_CHECKING:  # it needs torch, which a stage that passes one has
    from shardlab.models.sizes import ModelShapes

Predict = Callable[[CanonicalStrategy], Estimate | str]
"""predicts the seconds of a step on ranks and link of the search, or says why it cannot"""


def predictor(
    calibration: Calibration,
    timed: Sequence[TimingResult],
    fitted: Sequence[TimingResult],
    history: History,
    link: Link | None,
    threads: int,
    shapes: "ModelShapes",
) -> Predict:
    """Return predictions by the forecast, fitted on timings and on what earlier races timed.

    Args:
        timed: all timings; those with a link say how it is emulated here.
        fitted: those to fit on.
        link: of the search.
        threads: of each rank.

    Raises:
        UserError: the calibration or the timings lack something.
    """
    machine = fit_machine(calibration)
    raced = [
        run
        for race in history.races.values()
        for run in race
        if run.strategy is None or not unpredictable(strategy_of(run), machine)
    ]
    model = fit_model(machine, [*fitted, *raced])
    load = history.workload
    emulations = (run.link_emulation for run in timed if run.bits_per_second is not None)
    workload = Workload(
        world_size=load.world_size,
        parameters=load.parameters,
        accumulation=load.accumulation,
        threads=threads,
        bits_per_second=link.bits_per_second if link else None,
        delay_s=link.delay_ms / 1e3 if link else 0.0,
        link_emulation=next(emulations, "namespaces") if link else "none",
        ranks_per_node=link.ranks_per_node if link else 1,
    )

    def predict(strategy: CanonicalStrategy) -> Estimate | str:
        obstacle = model.obstacle(strategy)
        return obstacle or model.estimate(strategy, shapes.units(strategy), workload)

    return predict


def propose(
    number: int,
    history: History,
    agent: Agent,
    limit_bytes: int,
    space: Space,
    shapes: "ModelShapes",
    predict: Predict,
    judge: Judge,
    timed: Sequence[TimingResult],
    settings: TrialSettings,
    facts: Sequence[str] = (),
) -> Proposal:
    """Return the proposal of round `number`.

    Nothing is raced when the search has to stop, when no candidate is left or when the judge
    abstains; the verdict's reason says which.

    Args:
        limit_bytes: of the peak of a rank.
        space: codecs that may be proposed.
        timed: all timings, for the facts that speak for an action.
        settings: of the training runs of the round.
        facts: on the machine and the data, for the evidence.
    """
    peak, quality = peak_of(history, shapes), history.quality

    def option(strategy: CanonicalStrategy) -> Feasible:
        return Feasible(strategy, strategy.hash(), peak(strategy), predict(strategy))

    held, peaks = predict(history.incumbent_results.strategy), peaks_of(history, shapes)
    held_ms = None if isinstance(held, str) else 1e3 * held.value
    stop, evidence = reason_to_stop(history, agent), describe(history, agent, limit_bytes, facts)
    narrowed, shortlist = None, Shortlist([], [], 0)
    if stop is None:
        count = Counter(strategies=0, beyond_memory=0, spared=0)
        steps = _steps_of_replicas(history)
        space, too_short = settled(space, steps)
        if agent.candidates == "action":
            share = peaks[history.incumbent] / limit_bytes
            measured = Facts.of(history, timed, held_ms, share, agent.quality_tolerance)
            offer = Offer(space, shapes.layers, steps)
            legal = changed(history, measured, offer, shapes, peak, limit_bytes, count)
        else:
            legal = feasible(space, shapes, history.workload.world_size, peak, limit_bytes, count)
        ranked = by_step(legal, predict)
        shortlist = shorten(ranked, history, agent.quality_tolerance, agent.max_candidates)
        unpredicted = Counter(each.step for each in ranked if isinstance(each.step, str))
        predicted = len(ranked) - unpredicted.total()
        figures = {"unpredicted": dict(unpredicted), "predicted": predicted, "too_short": too_short}
        narrowed = Narrowing.model_validate({**count, "known": shortlist.known, **figures})
        if not shortlist.options:
            what = "action has a fact for it and" if agent.candidates == "action" else "strategy"
            stop = f"no {what} is legal, new, tolerated and fits in memory"
    trained = {key for key, row in history.measured.items() if row.trained}
    candidates = [
        candidate(each, quality, trained=each.hash in trained) for each in shortlist.options
    ]
    if stop is None:
        # what does not fit is no step to beat
        fits = peaks[history.incumbent] <= limit_bytes
        verdict = judge(Question(evidence, held_ms if fits else None, candidates))
    else:
        verdict = Verdict(choice=None, reason=stop, judge=agent.judge)
    chosen = [each.strategy for each in candidates if each.id == verdict.choice]
    assert bool(chosen) == (verdict.choice is not None), "a judge only chooses what is offered"
    arms = _arms(number, history, chosen[0], shortlist.tolerated) if chosen else {}
    return Proposal(
        round=number,
        settings=settings,
        workload=history.workload,
        incumbent=history.incumbent,
        evidence=evidence,
        memory_limit_bytes=limit_bytes,
        fits=peaks[history.incumbent] <= limit_bytes,
        peaks=peaks,
        space=narrowed,
        candidates=sorted(candidates, key=lambda each: each.id),
        verdict=verdict,
        arms=[
            candidate(option(arm), quality, "", roles, trained=key in trained)
            for key, (arm, roles) in arms.items()
        ],
        reference=[*history.start_results.trained],
        repetitions=agent.repetitions,
    )


def _steps_of_replicas(history: History) -> int:
    """Return the steps of the training runs; 0 where those have more or fewer replicas than the
    search, so that they show nothing of `sync`."""
    load = history.workload
    same = load.world_size == load.trained_on
    return min(run.steps for run in history.start_results.trained) if same else 0


def changed(
    history: History,
    facts: Facts,
    offer: Offer,
    shapes: "ModelShapes",
    peak: Peak,
    limit_bytes: int,
    count: Counter[str],
) -> Iterator[Feasible]:
    """Yield what the actions make of the incumbent and what fits in memory.

    Args:
        count: how many `strategies` are legal, and how many are `beyond_memory`.
    """
    for strategy, action in actions(history.incumbent_results.strategy, facts, offer):
        try:
            check_fits(strategy, history.workload.world_size, shapes.samples)
            memory = peak(strategy)
        except UserError:
            continue  # it does not fit the model
        count["strategies"] += 1
        if memory <= limit_bytes:
            yield Feasible(strategy, strategy.hash(), memory, action=action)
        else:
            count["beyond_memory"] += 1


def by_step(options: Iterable[Feasible], predict: Predict) -> list[Feasible]:
    """Return the options with predictions, the shortest step first; those without one last."""
    predicted = [option._replace(step=predict(option.strategy)) for option in options]
    # of ties first what compresses less, then by hash: the same list in every run
    predicted.sort(key=lambda it: (seconds(it), it.strategy.weights is not None, it.hash))
    return predicted


def seconds(option: Feasible) -> float:
    """Return the predicted step; infinite where there is none."""
    return math.inf if isinstance(option.step, str) else option.step.value


class Shortlist(NamedTuple):
    """Strategies that a judge may choose from, and those among which the controls are."""

    options: list[Feasible]
    """the shortest predicted steps of each class whose quality is known and tolerated, then one to
    explore: the shortest of unknown quality, or one whose step cannot be predicted. Likewise one
    whose replicas train apart, where there is one"""
    tolerated: list[Feasible]
    """all new strategies of known, tolerated quality, the shortest predicted step first"""
    known: int
    """number that were left out: timed before, failed, or worse than is tolerated"""


def shorten(
    ranked: Sequence[Feasible], history: History, tolerance: float, at_most: int
) -> Shortlist:
    """Shorten the predictions to at most so many strategies.

    Args:
        ranked: the shortest step first, those without prediction last.
        tolerance: largest relative rise of perplexity.
        at_most: strategies that a judge may choose from.
    """
    best: list[Feasible] = []
    tolerated: list[Feasible] = []
    unknown: list[Feasible] = []
    known, tried, quality_of = 0, history.tried, history.quality
    for option in ranked:
        quality = quality_of(option.strategy)
        if option.hash in tried or (quality and not is_tolerated(quality.perplexity, tolerance)):
            known += 1
        elif quality is None or isinstance(option.step, str):
            unknown.append(option)
        else:
            tolerated.append(option)
            if not any(_is_alike(option, other) for other in best):
                best.append(option)
    # replicas that train apart would hide codecs: their steps are the shortest on every slow link
    explored: dict[bool, Feasible] = {}
    for option in unknown:
        explored.setdefault(option.strategy.sync is None, option)
    exploratory = [*explored.values()][: at_most - 1]
    return Shortlist([*best[: at_most - len(exploratory)], *exploratory], tolerated, known)


def _is_alike(option: Feasible, best: Feasible) -> bool:
    """Return whether the shorter of two predictions stands for the other, too: engine, codecs and
    `sync` are the same, or only the codec of weights differs and the predictions tie."""
    if option.action is not None:
        return False  # each tests another hypothesis
    one, other = option.strategy, best.strategy
    weights, others = (s.weights.codec.name if s.weights else "none" for s in (one, other))
    return (
        one.engine == other.engine
        and one.gradients.codec.name == other.gradients.codec.name
        and one.sync == other.sync
        and (weights == others or seconds(option) <= (1 + MARGIN) * seconds(best))
    )


def candidate(
    option: Feasible,
    quality_of: Callable[[CanonicalStrategy], PerplexityRatio | None],
    why: str | None = None,
    roles: Sequence[Role] = (),
    trained: bool = False,
) -> Candidate:
    """Return an option with all predictions, for a judge or as an arm of a race.

    Args:
        why: its origin; None: the shortlist.
        trained: whether it has records.
    """
    quality, step = quality_of(option.strategy), option.step
    known = quality is not None and quality.ratio < math.inf
    source = quality.source if quality else "its codecs were never trained with"
    if isinstance(step, str):
        note, value, low, high = step, None, None, None
    else:
        note, (value, low, high) = source, (1e3 * each for each in step)
    if why is None:
        exploratory = value is None or quality is None
        why = "the shortest predicted step of its engine and codecs"
        if option.action is not None:
            why = f"{option.action.name}: {option.action.hypothesis}"
        why = "exploratory: its step or its quality is unknown" if exploratory else why
    return Candidate(
        hash=option.hash,
        strategy=option.strategy,
        label=option.strategy.label(),
        why=why,
        action=option.action,
        prediction=Prediction(
            step_ms=value,
            low_ms=low,
            high_ms=high,
            memory_bytes=option.memory_bytes,
            perplexity_ratio=quality.ratio if quality and known else None,
            note=note,
        ),
        roles=[*roles],
        trained=trained,
    )


def _arms(
    number: int, history: History, chosen: CanonicalStrategy, tolerated: Sequence[Feasible]
) -> dict[str, tuple[CanonicalStrategy, list[Role]]]:
    """Return by hash what the race times: the incumbent, the start, the choice and two controls,
    the forecast's first and a random strategy.

    A strategy that is several of them is raced once, in all its roles.

    Args:
        number: of the round, which the random choice depends on, so that a rerun repeats it.
        tolerated: of the shortlist.
    """
    raced: list[tuple[Role, CanonicalStrategy]] = [
        ("incumbent", history.incumbent_results.strategy),
        ("start", history.start_results.strategy),
        ("judge", chosen),
    ]
    if tolerated:
        drawn = random.Random(number).choice(tolerated)
        raced += [("forecast", tolerated[0].strategy), ("random", drawn.strategy)]
    arms: dict[str, tuple[CanonicalStrategy, list[Role]]] = {}
    for role, strategy in raced:
        arms.setdefault(strategy.hash(), (strategy, []))[1].append(role)
    return arms
