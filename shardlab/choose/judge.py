"""Judges: one follows a rule and needs no server, the other asks a language model.

A language model chooses one of the ids that it is offered. Only the id and the displayed reason of
its answer are used: no answer becomes code, a path or a command. Models favour positions in a list.
So each question is asked with the candidates in both orders, and a choice counts only where both
answers agree (Zheng et al. 2023, "Judging LLM-as-a-judge", section 3.4). Every answer is stored
under the hash of its prompt, so that a rerun needs no server.
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
from shardlab.choose.evidence import describe_prediction
from shardlab.choose.rank import Option, rank, simplicity_of
from shardlab.choose.records import Candidate, Verdict
from shardlab.choose.settings import Agent
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, sha256_of_value, write_json
from shardlab.predict.asked import changes_training
from shardlab.results.interval import Ratio

ABSTAIN = "abstain"
_LONGEST_REASON = 300
"""Maximum length of a reason, in characters."""

_INSTRUCTIONS = (
    "You help to search for the strategy with the shortest training step. You are given "
    "measurements and a list of candidates, each with an id, its settings or what it changes of "
    "the incumbent, and what a performance model predicts of it. The order of the list has no "
    "meaning. Choose the one candidate that should be raced against the incumbent next, or abstain "
    "when the measurements give no ground for a choice."
)
# describes the answer without an example, which small models would repeat
_QUESTION = (
    'Which candidate should be raced next? Answer with one JSON object: first the key "reason" '
    'with at most two sentences that cite measurements, then the key "choice" with the id of that '
    "candidate."
)


@dataclass(frozen=True)
class Question:
    """Question to a judge: which of the candidates should be raced next?"""

    evidence: str
    """Measurements, in words."""
    incumbent_ms: float | None
    """Predicted step of the incumbent; None: it cannot be predicted, or does not fit in memory."""
    candidates: list[Candidate]


Judge = Callable[[Question], Verdict]
"""Chooses one of the candidates by its id, or abstains, with the reason. Equal questions get equal
answers, in any order of the candidates."""


def make_judge(agent: Agent, answers: Path) -> Judge:
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
    """Choose by predictions, with the rule of `shardlab.choose.rank`.

    Predictions have errors in common, so their intervals say little of their ratio, and the margin
    of the rule tells them apart. The choice is the first candidate of the first kind that is not
    empty:

    1. the quality is known, and the candidate is told apart from the incumbent as faster;
    2. the quality is unknown, and the candidate is told apart as faster, or no step is predicted;
    3. the quality is known, and the candidate is not told apart from the incumbent.

    Abstains where all are empty.
    """
    incumbent = Option("incumbent", _step(question.incumbent_ms), measured=False)
    options = [_option(candidate) for candidate in question.candidates]
    # the tolerance is infinite, since the shortlist holds no known quality that is not tolerated
    ranking = rank([incumbent, *options], [], math.inf)

    def is_faster(option: Option) -> bool:
        return incumbent.step is None or option.step is None or ranking.precedes(option, incumbent)

    order = [ranked.option for ranked in ranking.order if ranked.option != incumbent]
    unknown = [ranked.option for ranked in ranking.apart if ranked.option != incumbent]
    kinds = (
        [option for option in order if is_faster(option)],
        [option for option in unknown if is_faster(option)],
        [option for option in order if not ranking.precedes(incumbent, option)],
    )
    best = next((option.name for kind in kinds for option in kind), None)
    if best is None:
        reason = "abstains: no candidate is predicted to be faster"
        return Verdict(choice=None, reason=reason, judge="rules")
    chosen = next(candidate for candidate in question.candidates if candidate.id == best)
    return Verdict(choice=chosen.id, reason=_reason(chosen, question.incumbent_ms), judge="rules")


def _reason(chosen: Candidate, incumbent_ms: float | None) -> str:
    """Return the prediction of the choice in words."""
    prediction = chosen.prediction
    if prediction.step_ms is None or prediction.perplexity_ratio is None:
        return f"{chosen.label}: {prediction.note}"
    than = "" if incumbent_ms is None else f", {incumbent_ms:.1f} ms for the incumbent"
    return f"{chosen.label}: a step of {prediction.step_ms:.1f} ms is predicted{than}"


def _step(step_ms: float | None) -> Ratio | None:
    return None if step_ms is None else Ratio(step_ms, math.nan, math.nan)


def _option(candidate: Candidate) -> Option:
    """Return a candidate as an option, with its step in ms."""
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
    """Return the choice of a model, or an abstention where its answers to both orders differ.

    Where the model gives no usable answer, rules choose, and the reason says why.

    Args:
        answers: folder of stored answers.
    """
    forward = sorted(question.candidates, key=lambda candidate: candidate.id)
    ids, files, choices = [candidate.id for candidate in forward], [], []
    try:
        for order in forward, forward[::-1]:
            messages = prompt(question, order)
            request = {"model": model.model, "messages": messages}
            file = answers / f"{sha256_of_value(request)[:16]}.json"
            if not file.exists():
                write_json(file, {**request, "answer": model.answer(messages, answer_schema(ids))})
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
    """Return the messages of a question, with the candidates in this order.

    They do not say why a candidate was shortlisted, which would carry authority.
    """
    listed = map(_listed, candidates)
    user = "\n".join([question.evidence, "", "Candidates:", *listed, "", _QUESTION])
    return [{"role": "system", "content": _INSTRUCTIONS}, {"role": "user", "content": user}]


def _listed(candidate: Candidate) -> str:
    """Return a candidate as a line: its action with hypothesis and fact, or else its label."""
    text, action = candidate.label, candidate.action
    if action is not None:
        text = (
            f"{action.name} ({action.change}). Hypothesis: {action.hypothesis}. Fact: {action.fact}"
        )
    return f"- {candidate.id}: {text}; {describe_prediction(candidate.prediction)}"


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
    """Return choice and reason of an answer, which may wrap its JSON object in other text.

    Raises:
        UserError: there is no choice, or its id was not offered; the message quotes no answer.
    """
    # where the chat template begins the answer with <think>, only </think> is in the text
    text = re.sub(r"<think>.*", "", answer.rpartition("</think>")[2], flags=re.DOTALL)
    # the text from the first brace to the last, or the last of several objects
    objects = re.findall(r"\{.*\}", text, re.DOTALL) + re.findall(r"\{[^{}]*\}", text)[::-1]
    verdict: dict[str, Any] = {}
    for candidate in objects:
        with suppress(ValueError, RecursionError):
            verdict = json.loads(candidate)
            break
    choice, reason = verdict.get("choice"), verdict.get("reason")
    if not isinstance(choice, str):
        raise UserError("the answer holds no choice in JSON")
    if choice not in (ABSTAIN, *offered):
        raise UserError("the answer names an id that was not offered")
    return choice, (one_line(reason) if isinstance(reason, str) else "") or "gave no reason"
