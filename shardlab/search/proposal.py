"""Proposal of a round: evidence, shortlist by prediction, verdict, and the arms of the race."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from shardlab.config.schema import Space as SpaceParameters
from shardlab.config.search import Agent
from shardlab.config.strategy import CanonicalStrategy
from shardlab.search.beginning import memory_limit
from shardlab.search.changes import aspects, changes
from shardlab.search.evidence import describe
from shardlab.search.feasible import Feasible, Shapes, feasible
from shardlab.search.history import History, Measured
from shardlab.search.judge import Judge, Question
from shardlab.search.peaks import peak_of, predicted_peaks
from shardlab.search.rounds import Arm, Candidate, Proposal, Role, Space, Verdict
from shardlab.search.shortlist import Shortlist, shorten
from shardlab.search.surrogate import Surrogate

_ID_DIGITS = 8


def reason_to_stop(history: History, agent: Agent) -> str | None:
    """Return why no more trials run, or None."""
    if history.workload.world_size == 1:
        return "one rank: there is nothing to shard and nothing to send"
    ran = [each for each in history.own_rounds if each.decision != "none"]
    if len(ran) >= agent.budget:
        return f"the budget of {agent.budget} trials is spent"
    minutes = sum(each.seconds for each in history.own_rounds) / 60
    if agent.budget_minutes is not None and minutes >= agent.budget_minutes:
        return f"the budget of {agent.budget_minutes:g} minutes is spent: {minutes:.1f} minutes"
    rejections = 0
    for each in reversed(ran):
        if each.decision == "accept":
            break
        rejections += 1
    if rejections >= agent.stop_loss:
        return f"stop-loss: the last {rejections} trials were rejected"
    return None


class Proposer:
    """Makes the proposal of one round.

    Args:
        space: what may be proposed.
        shapes: of the model.
        surrogate: that predicts.
        facts: on the machine and the data, for the evidence.
        offered: strategies to choose from in place of the space.
    """

    def __init__(
        self,
        history: History,
        agent: Agent,
        space: SpaceParameters,
        shapes: Shapes,
        surrogate: Surrogate,
        facts: Sequence[str] = (),
        offered: Sequence[CanonicalStrategy] | None = None,
    ) -> None:
        self._facts, self._offered = facts, offered
        self._history, self._agent, self._space = history, agent, space
        self._shapes, self._surrogate = shapes, surrogate
        self._ranks = history.workload.world_size
        self._limit = memory_limit(agent, history.workload)
        self._peak = peak_of(history, shapes)

    def propose(self, number: int, judge: Judge) -> Proposal:
        """Return the proposal of round `number`.

        Nothing is raced when the search has to stop, when no candidate is left or when the judge
        abstains; the verdict's reason says which.

        Raises:
            UserError: the judge cannot be asked.
        """
        history, stop = self._history, reason_to_stop(self._history, self._agent)
        candidates: list[Candidate] = []
        controls: list[CanonicalStrategy] = []
        space = None
        evidence = describe(history, self._agent, self._limit, self._facts)
        if stop is None:
            space, shortlist = self._shorten()
            candidates = self._candidates(shortlist)
            controls = self._controls(number, shortlist)
            stop = None if candidates else "no strategy is legal, new, tolerated and fits in memory"
        if stop is None:
            held = self._candidate(self._known(history.held), "the incumbent")
            verdict = judge.choose(Question(evidence, held, candidates))
        else:
            verdict = Verdict(choice=None, reason=stop, judge=judge.name)
        chosen = next((each.strategy for each in candidates if each.id == verdict.choice), None)
        assert (chosen is None) == (verdict.choice is None), "a judge only chooses what is offered"
        peaks = predicted_peaks(history, self._shapes)
        return Proposal(
            round=number,
            incumbent=history.incumbent,
            evidence=evidence,
            memory_limit_bytes=self._limit,
            fits=history.fits(history.held, self._limit, peaks),
            peaks=peaks,
            space=space,
            candidates=sorted(candidates, key=lambda each: each.id),
            verdict=verdict,
            arms=self._arms(chosen, *controls) if chosen else [],
            reference=history.reference.measurements,
        )

    def _shorten(self) -> tuple[Space, Shortlist]:
        """Return the shortlist of all that is feasible, and how the space was narrowed down."""
        count: Counter[str] = Counter()
        unpredicted: Counter[str] = Counter()
        found: Iterable[Feasible]
        if self._offered is None:
            found = feasible(self._space, self._shapes, self._ranks, self._peak, self._limit, count)
        else:
            found = (Feasible(each, each.hash(), self._peak(each)) for each in self._offered)
            count["legal"] = len(self._offered)
        near = self._agent.candidates == "action"
        ranked = self._surrogate.rank(
            (each for each in found if not near or self._is_near(each)), unpredicted
        )
        tolerance, most = self._agent.quality_tolerance, self._agent.max_candidates
        shortlist = shorten(ranked, self._history, tolerance, most)
        space = Space(
            strategies=count["legal"],
            beyond_memory=count["beyond memory"],
            spared=count["spared"],
            known=shortlist.known,
            unpredicted=dict(unpredicted),
            predicted=len(ranked) - unpredicted.total(),
        )
        return space, shortlist

    def _candidates(self, shortlist: Shortlist) -> list[Candidate]:
        """Return what the judge chooses from, with predictions; the exploratory one comes last."""
        why = "the shortest predicted step of its engine and codecs"
        candidates = [self._candidate(each.feasible, why) for each in shortlist.best]
        if shortlist.exploratory is not None:
            why = "exploratory: its step or its quality is unknown"
            candidates.append(self._candidate(shortlist.exploratory.feasible, why))
        return candidates

    def _is_near(self, each: Feasible) -> bool:
        """Return whether it differs from the incumbent in one aspect."""
        return len(aspects(changes(self._history.held.strategy, each.strategy))) == 1

    def _candidate(self, each: Feasible, why: str) -> Candidate:
        return Candidate(
            id=each.hash[:_ID_DIGITS],
            strategy=each.strategy,
            label=each.strategy.label(),
            why=why,
            prediction=self._surrogate.predict(each),
        )

    def _controls(self, number: int, shortlist: Shortlist) -> list[CanonicalStrategy]:
        """Return the forecast's first and a random strategy; like the choice they are new.

        Args:
            number: of the round, which the random choice depends on, so that a rerun repeats it.
        """
        tolerated = [each.feasible.strategy for each in shortlist.tolerated]
        return [tolerated[0], random.Random(number).choice(tolerated)] if tolerated else []

    def _arms(self, chosen: CanonicalStrategy, *controls: CanonicalStrategy) -> list[Arm]:
        """Return what the race times: the incumbent, the start, the choice and two controls.

        A strategy that is several of them is raced once, in all its roles.
        """
        history = self._history
        names: tuple[Role, ...] = ("incumbent", "start", "judge", "forecast", "random")
        raced = (history.held.strategy, history.reference.strategy, chosen, *controls)
        arms: dict[str, Arm] = {}
        for role, strategy in zip(names, raced, strict=False):
            key = strategy.hash()
            before = arms[key].roles if key in arms else []
            quality = history.quality(strategy)
            arms[key] = Arm(
                roles=[*before, role],
                hash=key,
                label=strategy.label(),
                strategy=strategy,
                trained=quality is not None and quality.sure,
            )
        return list(arms.values())

    def _known(self, entry: Measured) -> Feasible:
        return Feasible(entry.strategy, entry.hash, self._peak(entry.strategy))
