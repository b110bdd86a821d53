"""Proposal of a round: evidence, shortlist by prediction, verdict, and the arms of the race."""

import random
from collections import Counter
from collections.abc import Sequence

from shardlab.config.schema import Agent
from shardlab.config.schema import Space as SpaceParameters
from shardlab.config.strategy import CanonicalStrategy
from shardlab.search.evidence import aspects, describe
from shardlab.search.history import History, memory_limit
from shardlab.search.judge import Judge, Question
from shardlab.search.prediction import Predictor, Ranked, Shortlist, shorten
from shardlab.search.records import Candidate, Proposal, Role, Space, Verdict
from shardlab.search.space import Feasible, Shapes, feasible, peak_of, predicted_peaks


def reason_to_stop(history: History, agent: Agent) -> str | None:
    """Return why no more trials run, or None."""
    if history.workload.world_size == 1:
        return "one rank: there is nothing to shard and nothing to send"
    ran = [decision for decision in history.own_rounds if decision.decision != "none"]
    if len(ran) >= agent.budget:
        return f"the budget of {agent.budget} trials is spent"
    minutes = sum(decision.seconds for decision in history.own_rounds) / 60
    if agent.budget_minutes is not None and minutes >= agent.budget_minutes:
        return f"the budget of {agent.budget_minutes:g} minutes is spent: {minutes:.1f} minutes"
    rejections = 0
    for decision in reversed(ran):
        if decision.decision == "accept":
            break
        rejections += 1
    if rejections >= agent.stop_loss:
        return f"stop-loss: the last {rejections} trials were rejected"
    return None


class Proposer:
    """Makes the proposal of one round.

    Args:
        space: codecs that may be proposed.
        shapes: of the model.
        predictor: of strategies.
        facts: on the machine and the data, for the evidence.
    """

    def __init__(
        self,
        history: History,
        agent: Agent,
        space: SpaceParameters,
        shapes: Shapes,
        predictor: Predictor,
        facts: Sequence[str] = (),
    ) -> None:
        self._history, self._agent, self._space = history, agent, space
        self._shapes, self._predictor, self._facts = shapes, predictor, facts
        self._limit = memory_limit(agent, history.workload)
        self._peak = peak_of(history, shapes)

    def propose(self, number: int, judge: Judge) -> Proposal:
        """Return the proposal of round `number`.

        Nothing is raced when the search has to stop, when no candidate is left or when the judge
        abstains; the verdict's reason says which.
        """
        history, stop = self._history, reason_to_stop(self._history, self._agent)
        candidates: list[Candidate] = []
        tolerated: list[Ranked] = []
        space = None
        evidence = describe(history, self._agent, self._limit, self._facts)
        if stop is None:
            space, shortlist = self._shorten()
            candidates = self._candidates(shortlist)
            tolerated = shortlist.tolerated
            stop = None if candidates else "no strategy is legal, new, tolerated and fits in memory"
        if stop is None:
            held = self._candidate(self._feasible(history.held.strategy), "the incumbent")
            verdict = judge(Question(evidence, held, candidates))
        else:
            verdict = Verdict(choice=None, reason=stop, judge=self._agent.judge)
        chosen = next((option for option in candidates if option.id == verdict.choice), None)
        assert (chosen is None) == (verdict.choice is None), "a judge only chooses what is offered"
        peaks = predicted_peaks(history, self._shapes)
        return Proposal(
            round=number,
            workload=history.workload,
            incumbent=history.incumbent,
            evidence=evidence,
            memory_limit_bytes=self._limit,
            fits=history.fits(history.held, self._limit, peaks),
            peaks=peaks,
            space=space,
            candidates=sorted(candidates, key=lambda option: option.id),
            verdict=verdict,
            arms=self._arms(number, chosen.strategy, tolerated) if chosen else [],
            reference=history.reference.trained,
        )

    def _shorten(self) -> tuple[Space, Shortlist]:
        """Return the shortlist of all that is feasible, and how the space was narrowed down."""
        count: Counter[str] = Counter()
        unpredicted: Counter[str] = Counter()
        ranks, near = self._history.workload.world_size, self._agent.candidates == "action"
        legal = feasible(self._space, self._shapes, ranks, self._peak, self._limit, count)
        held = self._history.held.strategy
        options = (
            option for option in legal if not near or len(aspects(held, option.strategy)) == 1
        )
        ranked = self._predictor.rank(options, unpredicted)
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
        candidates = [self._candidate(ranked.feasible, why) for ranked in shortlist.best]
        if shortlist.exploratory is not None:
            why = "exploratory: its step or its quality is unknown"
            candidates.append(self._candidate(shortlist.exploratory.feasible, why))
        return candidates

    def _candidate(self, option: Feasible, why: str) -> Candidate:
        quality = self._history.quality(option.strategy)
        return Candidate(
            hash=option.hash,
            strategy=option.strategy,
            label=option.strategy.label(),
            why=why,
            prediction=self._predictor.predict(option),
            has_quality=quality is not None and quality.sure,
        )

    def _arms(
        self, number: int, chosen: CanonicalStrategy, tolerated: Sequence[Ranked]
    ) -> list[Candidate]:
        """Return what the race times: the incumbent, the start, the choice and two controls, the
        forecast's first and a random strategy.

        A strategy that is several of them is raced once, in all its roles.

        Args:
            number: of the round, which the random choice depends on, so that a rerun repeats it.
            tolerated: of the shortlist.
        """
        history = self._history
        raced: list[tuple[Role, Feasible]] = [
            ("incumbent", self._feasible(history.held.strategy)),
            ("start", self._feasible(history.reference.strategy)),
            ("judge", self._feasible(chosen)),
        ]
        if tolerated:
            drawn = random.Random(number).choice(tolerated)
            raced += [("forecast", tolerated[0].feasible), ("random", drawn.feasible)]
        roles: dict[str, list[Role]] = {}
        for role, option in raced:
            roles.setdefault(option.hash, []).append(role)
        arms = {option.hash: option for _, option in raced}
        return [
            self._candidate(option, "").model_copy(update={"roles": roles[key]})
            for key, option in arms.items()
        ]

    def _feasible(self, strategy: CanonicalStrategy) -> Feasible:
        return Feasible(strategy, strategy.hash(), self._peak(strategy))
