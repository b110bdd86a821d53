"""Proposal of a round: evidence, shortlist by prediction, verdict, and the arms of the race.

Steps are predicted by the forecast, memory by formula, quality by earlier runs. Many strategies of
a grid lie within the error of a prediction. So the shortlist holds the best strategy of each class
(an engine with its codecs), and one of unknown quality, or two where one of them has `sync`.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardlab.choose.actions import Choices, actions
from shardlab.choose.evidence import describe
from shardlab.choose.facts import Measurements
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
from shardlab.choose.space import (
    Feasible,
    Peak,
    drop_short_sync,
    feasible,
    peak_function,
    peaks_by_hash,
)
from shardlab.core.errors import UserError
from shardlab.core.link import Link
from shardlab.predict.machine import fit_machine
from shardlab.predict.model import Estimate, Workload, fit_model, strategy_of, unpredictable
from shardlab.predict.settings import Space
from shardlab.results.calibration_record import Calibration
from shardlab.results.timing_result import TimingResult
from shardlab.strategy.document import CanonicalStrategy
from shardlab.strategy.validation import check_fits

if TYPE_CHECKING:  # the module imports torch, which this package does without
    from shardlab.models.sizes import ModelShapes

Predict = Callable[[CanonicalStrategy], Estimate | str]
"""Predicts the seconds of a step on the ranks and the link of the search, or says why it cannot."""


def predictor(
    calibration: Calibration,
    timed: Sequence[TimingResult],
    fitted: Sequence[TimingResult],
    history: History,
    link: Link | None,
    threads: int,
    shapes: "ModelShapes",
) -> Predict:
    """Return the function that predicts steps by the forecast, fitted on timings and earlier races.

    Args:
        timed: all timings; a timing with a link says how this machine emulates links.
        fitted: timings to fit on.
        link: link of the search.
        threads: threads of each rank.

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
    context: Sequence[str] = (),
) -> Proposal:
    """Return the proposal of round `number`.

    Nothing is raced when the search has to stop, when no candidate is left or when the judge
    abstains; the verdict's reason says which.

    Args:
        limit_bytes: limit of the peak of a rank.
        space: codecs and `sync` that may be proposed.
        timed: all timings, for the facts that speak for an action.
        settings: settings of the training runs of the round.
        context: sentences on the machine and the data, for the evidence.
    """
    peak, quality = peak_function(history, shapes), history.quality

    def option(strategy: CanonicalStrategy) -> Feasible:
        return Feasible(strategy, strategy.hash(), peak(strategy), predict(strategy))

    step, peaks = predict(history.incumbent_results.strategy), peaks_by_hash(history, shapes)
    incumbent_ms = None if isinstance(step, str) else 1e3 * step.value
    stop, evidence = reason_to_stop(history, agent), describe(history, agent, limit_bytes, context)
    narrowed, shortlist = None, Shortlist([], [], 0)
    if stop is None:
        count = Counter(strategies=0, beyond_memory=0, spared=0)
        steps = _steps_of_replicas(history)
        space, too_short = drop_short_sync(space, steps)
        if agent.candidates == "action":
            share = peaks[history.incumbent] / limit_bytes
            measured = Measurements.of(history, timed, incumbent_ms, share, agent.quality_tolerance)
            choices = Choices(space, shapes.layers, steps)
            legal = feasible_actions(history, measured, choices, shapes, peak, limit_bytes, count)
        else:
            legal = feasible(space, shapes, history.workload.world_size, peak, limit_bytes, count)
        ranked = sort_by_step(legal, predict)
        shortlist = make_shortlist(ranked, history, agent.quality_tolerance, agent.max_candidates)
        reasons = (option.step for option in ranked)
        unpredicted = Counter(reason for reason in reasons if isinstance(reason, str))
        predicted = len(ranked) - unpredicted.total()
        figures = {"unpredicted": dict(unpredicted), "predicted": predicted, "too_short": too_short}
        narrowed = Narrowing.model_validate({**count, "known": shortlist.excluded, **figures})
        if not shortlist.options:
            subject = "action has a fact for it and" if agent.candidates == "action" else "strategy"
            stop = f"no {subject} is legal, new, tolerated and fits in memory"
    trained = {key for key, row in history.measured.items() if row.trained}
    candidates = [
        candidate_of(listed, quality, trained=listed.hash in trained)
        for listed in shortlist.options
    ]
    fits = peaks[history.incumbent] <= limit_bytes
    if stop is None:
        # a candidate need not beat the step of an incumbent that does not fit
        verdict = judge(Question(evidence, incumbent_ms if fits else None, candidates))
    else:
        verdict = Verdict(choice=None, reason=stop, judge=agent.judge)
    chosen = [offered.strategy for offered in candidates if offered.id == verdict.choice]
    assert bool(chosen) == (verdict.choice is not None), "a judge only chooses what is offered"
    arms = _arms(number, history, chosen[0], shortlist.tolerated) if chosen else {}
    return Proposal(
        round=number,
        settings=settings,
        workload=history.workload,
        incumbent=history.incumbent,
        evidence=evidence,
        memory_limit_bytes=limit_bytes,
        fits=fits,
        peaks=peaks,
        space=narrowed,
        candidates=sorted(candidates, key=lambda candidate: candidate.id),
        verdict=verdict,
        arms=[
            candidate_of(option(arm), quality, "", roles, trained=key in trained)
            for key, (arm, roles) in arms.items()
        ],
        reference=[*history.start_results.trained],
        repetitions=agent.repetitions,
    )


def _steps_of_replicas(history: History) -> int:
    """Return the steps of a training run; 0 where training has another number of ranks than the
    search, so that it shows nothing of `sync`."""
    load = history.workload
    if load.world_size != load.trained_on:
        return 0
    return min(run.steps for run in history.start_results.trained)


def feasible_actions(
    history: History,
    measured: Measurements,
    choices: Choices,
    shapes: "ModelShapes",
    peak: Peak,
    limit_bytes: int,
    count: Counter[str],
) -> Iterator[Feasible]:
    """Yield the strategies that actions lead to and that fit in memory.

    Args:
        count: is updated: how many `strategies` are legal, and how many are `beyond_memory`.
    """
    for strategy, action in actions(history.incumbent_results.strategy, measured, choices):
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


def sort_by_step(options: Iterable[Feasible], predict: Predict) -> list[Feasible]:
    """Return the options with predictions, the shortest step first, without a prediction last."""

    def key(option: Feasible) -> tuple[float, bool, str]:
        # ties: uncompressed weights first, then by hash, so that every run gives the same list
        return predicted_seconds(option), option.strategy.weights is not None, option.hash

    return sorted((option._replace(step=predict(option.strategy)) for option in options), key=key)


def predicted_seconds(option: Feasible) -> float:
    """Return the predicted step; infinite where it cannot be predicted."""
    return math.inf if isinstance(option.step, str) else option.step.value


class Shortlist(NamedTuple):
    """Strategies that a judge may choose from, and strategies that the controls are drawn from."""

    options: list[Feasible]
    """Strategies for the judge: of each class the shortest predicted step at a known, tolerated
    quality, then one to explore, whose quality is unknown or whose step cannot be predicted. With
    `sync` among the unknown, a second one to explore."""
    tolerated: list[Feasible]
    """All new strategies of known, tolerated quality, the shortest predicted step first."""
    excluded: int
    """Number of strategies that were timed before, failed, or are worse than is tolerated."""


def make_shortlist(
    ranked: Sequence[Feasible], history: History, tolerance: float, max_candidates: int
) -> Shortlist:
    """Return the shortlist of the predicted strategies.

    Args:
        ranked: strategies, the shortest step first, without a prediction last.
        tolerance: largest relative rise of perplexity.
        max_candidates: maximum number of strategies for the judge.
    """
    best: list[Feasible] = []
    tolerated: list[Feasible] = []
    unknown: list[Feasible] = []
    excluded, tried, quality_of = 0, history.tried, history.quality
    for option in ranked:
        quality = quality_of(option.strategy)
        if option.hash in tried or (quality and not is_tolerated(quality.perplexity, tolerance)):
            excluded += 1
        elif quality is None or isinstance(option.step, str):
            unknown.append(option)
        else:
            tolerated.append(option)
            if not any(_represents(listed, option) for listed in best):
                best.append(option)
    # at most one of each kind: on slow links `sync` has the shortest steps and would hide codecs
    explored: dict[bool, Feasible] = {}
    for option in unknown:
        explored.setdefault(option.strategy.sync is None, option)
    exploratory = [*explored.values()][: max_candidates - 1]
    options = [*best[: max_candidates - len(exploratory)], *exploratory]
    return Shortlist(options, tolerated, excluded)


def _represents(listed: Feasible, option: Feasible) -> bool:
    """Return whether a listed strategy stands for a slower option: engine, codecs and `sync` are
    equal, or only the codec of weights differs and the predictions tie."""
    if option.action is not None:
        return False  # each action tests another hypothesis
    first, second = listed.strategy, option.strategy
    if (first.engine, first.sync) != (second.engine, second.sync):
        return False
    if first.gradients.codec.name != second.gradients.codec.name:
        return False
    weights = {s.weights.codec.name if s.weights else "none" for s in (first, second)}
    tie = predicted_seconds(option) <= (1 + MARGIN) * predicted_seconds(listed)
    return len(weights) == 1 or tie


def candidate_of(
    option: Feasible,
    quality_of: Callable[[CanonicalStrategy], PerplexityRatio | None],
    why: str | None = None,
    roles: Sequence[Role] = (),
    trained: bool = False,
) -> Candidate:
    """Return an option with all predictions, for a judge or as an arm of a race.

    Args:
        why: why it is a candidate; None: the reason for the shortlist.
        trained: whether it has training runs.
    """
    quality, step = quality_of(option.strategy), option.step
    finite = quality is not None and quality.ratio < math.inf
    source = quality.source if quality else "its codecs were never trained with"
    if isinstance(step, str):
        note, value, low, high = step, None, None, None
    else:
        note, (value, low, high) = source, (1e3 * seconds for seconds in step)
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
            perplexity_ratio=quality.ratio if quality and finite else None,
            note=note,
        ),
        roles=[*roles],
        trained=trained,
    )


def _arms(
    number: int, history: History, chosen: CanonicalStrategy, tolerated: Sequence[Feasible]
) -> dict[str, tuple[CanonicalStrategy, list[Role]]]:
    """Return by hash the strategies of the race, with their roles: the incumbent, the start, the
    choice, and two controls, which are the forecast's first and a random strategy.

    A strategy with several roles is raced once.

    Args:
        number: number of the round, the seed of the random choice, so that a rerun repeats it.
        tolerated: strategies that the controls are taken from.
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
