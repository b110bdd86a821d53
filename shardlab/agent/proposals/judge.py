"""The contract of a judge, and the deterministic judge that needs no server."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from shardlab.agent.proposals.changes import (
    SHARDING,
    Change,
    changes,
    expected_effect,
    in_words,
    measured_effects,
)
from shardlab.agent.proposals.seeds import EXPOSED_WORTH
from shardlab.agent.records.history import History, Measured
from shardlab.agent.records.rounds import Candidate, Verdict
from shardlab.strategy.strategy import Strategy


@dataclass(frozen=True)
class Question:
    """Question to a judge: which of the candidates should be measured next?"""

    evidence: str
    """the facts, in words"""
    history: History
    """the same facts, as data"""
    candidates: list[Candidate]
    quality_tolerance: float


class Judge(ABC):
    """Chooses among the candidates of a question, or abstains, and says why.

    A judge never invents a strategy: the choice of its verdict is the id of one of the candidates
    or None. It answers equal questions equally, whatever the order of the candidates.
    """

    name: str

    @abstractmethod
    def choose(self, question: Question) -> Verdict:
        """Return the verdict.

        Raises:
            UserError: the judge cannot be asked (only judges on a server).
        """

    def _verdict(self, choice: str | None, reason: str) -> Verdict:
        return Verdict(choice=choice, reason=reason, judge=self.name)


_CODECS = {"codec": "gradients", "weights": "weights"}
"""the setting of the codec, and the kind of message that it encodes"""
_EXPOSED = "exposed communication"
_ENCODING = "encoding and decoding"
_REMEDIES = {
    _EXPOSED: (*_CODECS, "prefetch", "reshard_after_forward", "bucket_mb", "wrap", "engine"),
    "idle time": ("wrap", "bucket_mb", "reshard_after_forward", "engine", "route"),
    _ENCODING: (*_CODECS, "minimum_size", "error_feedback", "route"),
}
"""settings that act on a term of the step time, the most direct first"""
_INDIRECT = 100
"""rank of a change that acts on none of them"""


class RuleJudge(Judge):
    """Judge that follows one rule, from the evidence alone.

    1. A candidate differs from the incumbent in its sharding, in its gradient codec, in its
       weight codec, or in several of them. A difference that also lies between two measured
       strategies is judged by what it did there (codecs by their names, whatever their options);
       such differences are added up. The fastest comes first; a candidate that this makes slower,
       or worse in perplexity than is tolerated, is left out.
    2. Then come candidates of which nothing was measured: first those whose settings act on the
       largest term of the incumbent's step (exposed communication, idle time, encoding and
       decoding), the most direct setting first, then all others. Of the codecs of gradients and
       of weights, that of the kind with more bytes on the wire comes first. To drop a codec does
       not act on communication, nor to bring one in on encoding.
    3. Ties: fewer changed settings, then the id.

    It abstains when nothing is left, or when rule 1 names nothing and the largest term is below
    5 % of the step.
    """

    name = "rules"

    def choose(self, question: Question) -> Verdict:  # noqa: D102
        incumbent = question.history.incumbent
        term, share = _largest_term(incumbent)
        effects = measured_effects(question.history)
        known, unknown = [], []
        for candidate in question.candidates:
            found = changes(incumbent.strategy, candidate.strategy)
            expected = expected_effect(found, effects)
            if expected is None:
                place = _directness(found, term, incumbent)
                unknown.append((place, len(found), candidate.id, candidate))
            elif expected.is_gain(question.quality_tolerance):
                known.append((expected.log_step, len(found), candidate.id, candidate))
        if known:
            log_step, _, _, candidate = min(known)
            return self._verdict(
                candidate.id,
                f"{_words(incumbent, candidate)}: where such a change was measured, steps took "
                f"{math.exp(log_step):.3f} times as long",
            )
        if unknown and share >= EXPOSED_WORTH:
            directness, _, _, candidate = min(unknown)
            acts = "acts on it" if directness < _INDIRECT else "does not act on it"
            return self._verdict(
                candidate.id,
                f"{term} is the largest term, {share:.0%} of a traced step"
                f"{_bytes(term, incumbent)}; {_words(incumbent, candidate)} {acts} "
                "and was never measured",
            )
        why = (
            f"the largest term, {term}, is {share:.1%} of a traced step"
            if unknown
            else "every candidate was slower or worse where such a change was measured"
        )
        return self._verdict(None, f"abstains: {why}")


def _largest_term(incumbent: Measured) -> tuple[str, float]:
    """Return the largest term of a traced step that a strategy can change, and its share."""
    mean = incumbent.mean
    terms = {
        _EXPOSED: mean("exposed_comm_ms"),
        "idle time": mean("idle_ms"),
        _ENCODING: mean("encode_ms") + mean("decode_ms"),
    }
    name = max(terms, key=lambda term: terms[term])
    return name, terms[name] / mean("profiled_step_ms")


def _directness(found: tuple[Change, ...], term: str, incumbent: Measured) -> int:
    keys = {change.key for change in found}
    if "engine" in keys:  # settings that follow from the new codec
        keys -= {*SHARDING, "weights"} - {"engine"}
    for key, before, after in found:
        # removing a codec sends no fewer bytes, and adding one encodes no faster
        if key in _CODECS and (before if term == _ENCODING else after) == "none":
            keys -= {key}
    remedies = _remedies(term, incumbent)
    return min((remedies.index(key) for key in keys if key in remedies), default=_INDIRECT)


def _remedies(term: str, incumbent: Measured) -> list[str]:
    """Return the settings of `_REMEDIES`, first the codec of the kind that sends more bytes."""
    settings = _REMEDIES[term]
    codecs = [key for key in settings if key in _CODECS]
    codecs.sort(key=lambda key: -incumbent.mean(f"{_CODECS[key]}_bytes_wire"))
    return [*codecs, *(key for key in settings if key not in _CODECS)]


def _bytes(term: str, incumbent: Measured) -> str:
    """Describe the composition of a term of communication."""
    if term != _EXPOSED:
        return ""
    moved = (incumbent.mean(f"{kind}_bytes_wire") / 1e6 for kind in _CODECS.values())
    return ", with {:.3f} MB of gradients and {:.3f} MB of weights on the wire".format(*moved)


def _words(incumbent: Measured, candidate: Candidate) -> str:
    return in_words(_without_consequences(incumbent.strategy, candidate.strategy))


def _without_consequences(before: Strategy, after: Strategy) -> tuple[Change, ...]:
    """Leave out settings that merely follow from a new codec, engine or wrapping."""
    found = changes(before, after)
    keys = {change.key for change in found}
    implied = {"weights_minimum_size"} if "weights" in keys else set()
    if "codec" in keys:
        implied |= {"route", "minimum_size"}
    if "engine" in keys:
        implied |= {*SHARDING, "weights"} - {"engine"}
    elif "wrap" in keys:
        implied |= {"reshard_after_forward"}
    return tuple(change for change in found if change.key not in implied)
