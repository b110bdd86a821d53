"""Judges: one follows a rule and needs no server, the other asks a language model.

A language model chooses one of the ids that it is offered, and nothing else of its answers is used
but the reason that is shown: no answer becomes code, a path or a command. Models favour places in a
list, so each question is asked with the candidates in both orders, and only a choice that both
answers agree on counts (Zheng et al. 2023, "Judging LLM-as-a-judge", section 3.4). Every answer is
stored under the hash of its prompt, so that a rerun needs no server.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.choose.chat import Endpoint, LocalModel, Messages, one_line
from shardlab.choose.evidence import predicted
from shardlab.choose.rank import Option, rank, simplicity_of
from shardlab.choose.records import Candidate, Verdict
from shardlab.choose.settings import Agent
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, sha256_of_value, write_json
from shardlab.predict.asked import changes_training
from shardlab.results.interval import Ratio

ABSTAIN = "abstain"
_LONGEST_REASON = 300
"""characters"""

_INSTRUCTIONS = (
    "You help to search for the strategy with the shortest training step. You are given "
    "measurements and a list of candidates, each with an id, its settings or what it changes of "
    "the incumbent, and what a performance model predicts of it. The order of the list has no "
    "meaning. Choose the one candidate that should be raced against the incumbent next, or abstain "
    "when the measurements give no ground for a choice."
)
# in words: small models repeat an example of the answer
_QUESTION = (
    'Which candidate should be raced next? Answer with one JSON object: first the key "reason" '
    'with at most two sentences that cite measurements, then the key "choice" with the id of that '
    "candidate."
)


@dataclass(frozen=True)
class Question:
    """Question to a judge: which of the candidates should be raced next?"""

    evidence: str
    """the facts, in words"""
    incumbent_ms: float | None
    """predicted step of what is held; None: it cannot be predicted, or does not fit in memory"""
    candidates: list[Candidate]


Judge = Callable[[Question], Verdict]
"""chooses one of the candidates by its id, or abstains, and says why; equal questions get equal
answers, whatever the order of the candidates"""


def judge_of(agent: Agent, answers: Path) -> Judge:
    """Return the judge that the parameters name.

    Args:
        answers: folder in which the answers of a language model are stored.
    """
    if agent.judge == "rules":
        return choose_by_rules
    model: Endpoint | LocalModel
    if agent.judge == "local":
        file = Path(agent.model_file) if agent.model_file else None
        model = LocalModel(file, agent.timeout_s, agent.max_tokens)
    else:
        assert agent.endpoint and agent.model, "the parameters demand both with judge: http"
        model = Endpoint(agent.endpoint, agent.model, agent.timeout_s, agent.max_tokens)
    return lambda question: choose_by_model(question, model, answers)


def choose_by_rules(question: Question) -> Verdict:
    """Choose from predictions alone, by the rule of `shardlab.choose.rank`.

    Predictions err together, so that the interval of one says little of its ratio to another: the
    margin of the rule tells them apart. The first candidate of the first of these kinds that there
    are any of:

    1. the quality is known, and it is told apart from the incumbent as faster;
    2. the quality is unknown, and so is it, or no step can be predicted;
    3. the quality is known, and it is not told apart from the incumbent.

    Abstains when there is none.
    """
    held = Option("incumbent", _step(question.incumbent_ms), measured=False)
    options = [_option(candidate) for candidate in question.candidates]
    # what is known is tolerated, as the shortlist holds nothing else
    ranking = rank([held, *options], [], math.inf)

    def is_faster(option: Option) -> bool:
        return held.step is None or option.step is None or ranking.precedes(option, held)

    order = [ranked.option for ranked in ranking.order if ranked.option != held]
    unknown = [ranked.option for ranked in ranking.apart if ranked.option != held]
    kinds = (
        [option for option in order if is_faster(option)],
        [option for option in unknown if is_faster(option)],
        [option for option in order if not ranking.precedes(held, option)],
    )
    best = next((option.name for kind in kinds for option in kind), None)
    if best is None:
        reason = "abstains: no candidate is predicted to be faster"
        return Verdict(choice=None, reason=reason, judge="rules")
    chosen = next(candidate for candidate in question.candidates if candidate.id == best)
    return Verdict(choice=chosen.id, reason=_reason(chosen, question.incumbent_ms), judge="rules")


def _reason(chosen: Candidate, held_ms: float | None) -> str:
    """Return what is predicted of the choice."""
    prediction = chosen.prediction
    if prediction.step_ms is None or prediction.perplexity_ratio is None:
        return f"{chosen.label}: {prediction.note}"
    than = "" if held_ms is None else f", {held_ms:.1f} ms for the incumbent"
    return f"{chosen.label}: a step of {prediction.step_ms:.1f} ms is predicted{than}"


def _step(step_ms: float | None) -> Ratio | None:
    return None if step_ms is None else Ratio(step_ms, math.nan, math.nan)


def _option(candidate: Candidate) -> Option:
    """Return a candidate as an option; its step is in ms."""
    prediction, strategy = candidate.prediction, candidate.strategy
    quality = prediction.perplexity_ratio
    return Option(
        candidate.id,
        _step(prediction.step_ms),
        measured=False,
        lossless=quality is not None and not changes_training(strategy),
        perplexity=None if quality is None else Ratio(quality, quality, quality),
        simplicity=simplicity_of(strategy),
        label=candidate.label,
    )


def choose_by_model(question: Question, model: Endpoint | LocalModel, answers: Path) -> Verdict:
    """Return the choice that a model's answers to both orders of the candidates agree on.

    Where it gives no usable answer, rules choose, and the reason says why.

    Args:
        answers: folder of stored answers.
    """
    forward = sorted(question.candidates, key=lambda candidate: candidate.id)
    ids, files, choices = [candidate.id for candidate in forward], [], []
    try:
        for order in forward, forward[::-1]:
            messages = prompt(question, order)
            asked = {"model": model.model, "messages": messages}
            file = answers / f"{sha256_of_value(asked)[:16]}.json"
            if not file.exists():
                write_json(file, {**asked, "answer": model.answer(messages, answer_schema(ids))})
            files.append(str(file))
            choices.append(read_choice(str(read_json(file)["answer"]), ids))
    except UserError as error:
        rules = choose_by_rules(question)
        reason = f"{model.name} gave no usable answer ({error}); {rules.reason}"
        return rules.model_copy(update={"reason": reason, "prompts": files})
    (choice, reason), (other, _) = choices
    if choice != other:
        reason = f"abstains: {choice} in one order of the candidates, {other} in the reverse"
        choice = ABSTAIN
    chosen = None if choice == ABSTAIN else choice
    return Verdict(choice=chosen, reason=reason, judge=model.name, prompts=files)


def prompt(question: Question, candidates: Sequence[Candidate]) -> Messages:
    """Return the messages of a question, with its candidates in this order.

    The origin of a candidate is left out, since it would carry authority.
    """
    listed = map(_listed, candidates)
    user = "\n".join([question.evidence, "", "Candidates:", *listed, "", _QUESTION])
    return [{"role": "system", "content": _INSTRUCTIONS}, {"role": "user", "content": user}]


def _listed(candidate: Candidate) -> str:
    """Return a candidate as a line; one that an action makes, as what it changes, and why."""
    what, action = candidate.label, candidate.action
    if action is not None:
        what = (
            f"{action.name} ({action.change}). Hypothesis: {action.hypothesis}. Fact: {action.fact}"
        )
    return f"- {candidate.id}: {what}; {predicted(candidate.prediction)}"


def answer_schema(offered: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of an answer: a reason of bounded length, then one of the ids."""
    reason = {"type": "string", "maxLength": _LONGEST_REASON}
    choice = {"type": "string", "enum": [*offered, ABSTAIN]}
    properties = {"reason": reason, "choice": choice}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def read_choice(answer: str, offered: Sequence[str]) -> tuple[str, str]:
    """Parse choice and reason of an answer, which may wrap its JSON object in other text.

    Raises:
        UserError: no choice, or an id that was not offered; the message holds none of its text.
    """
    # templates that begin the answer with <think> leave it out
    text = re.sub(r"<think>.*", "", answer.rpartition("</think>")[2], flags=re.DOTALL)
    # all of it, or the last of several
    objects = re.findall(r"\{.*\}", text, re.DOTALL) + re.findall(r"\{[^{}]*\}", text)[::-1]
    verdict: dict[str, Any] = {}
    for found in objects:
        with suppress(ValueError, RecursionError):
            verdict = json.loads(found)
            break
    choice, reason = verdict.get("choice"), verdict.get("reason")
    if not isinstance(choice, str):
        raise UserError("the answer holds no choice in JSON")
    if choice not in (ABSTAIN, *offered):
        raise UserError("the answer names an id that was not offered")
    return choice, (one_line(reason) if isinstance(reason, str) else "") or "gave no reason"
