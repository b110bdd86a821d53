"""Judges: one follows a rule and needs no server, the other asks a language model.

A language model is asked at an OpenAI-compatible endpoint. It chooses one of the ids that it is
offered, and nothing else of its answers is used but the reason that is shown: no answer becomes
code, a path or a command. Models favour places in a list, so each question is asked with the
candidates in both orders, and only a choice that both answers agree on counts (Zheng et al. 2023,
"Judging LLM-as-a-judge", section 3.4). Every answer is stored under the hash of its prompt, so that
a rerun needs no server.
"""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from shardlab.config.schema import Agent
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, sha256_of_value, write_json
from shardlab.search.evidence import in_words, predicted
from shardlab.search.records import Candidate, Prediction, Verdict

KEY_VARIABLE = "SHARDLAB_API_KEY"
ABSTAIN = "abstain"

_LONGEST_TEXT = 500
"""characters of a reason, or of a sentence of the server"""
_INSTRUCTIONS = (
    "You help to search for the strategy with the shortest training step. You are given "
    "measurements and a list of candidates, each with an id, the settings in which it differs from "
    "the incumbent, and what a performance model predicts of it. The order of the list has no "
    "meaning. Choose the one candidate that should be raced against the incumbent next, or abstain "
    "when the measurements give no ground for a choice. "
    'Answer with one JSON object: {"reason": "at most two sentences that cite measurements", '
    '"choice": "the id of a candidate, or abstain"}.'
)

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Question:
    """Question to a judge: which of the candidates should be raced next?"""

    evidence: str
    """the facts, in words"""
    incumbent: Candidate
    """that is held, and not to be chosen"""
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
    assert agent.endpoint and agent.model, "the parameters demand both with judge: http"
    return LanguageModelJudge(agent.endpoint, agent.model, answers).choose


def choose_by_rules(question: Question) -> Verdict:
    """Choose from predictions alone.

    Of the candidates of the first of these kinds that there are any of, the one with the lowest
    upper end of its predicted step:

    1. the quality is known, and a shorter step than the incumbent's is expected;
    2. the quality is unknown, and a shorter step is expected, or none can be predicted;
    3. the quality is known, and the interval reaches below the incumbent's step.

    Abstains when there is none.
    """
    held = question.incumbent.prediction.step_ms
    kinds: list[list[Candidate]] = [[], [], []]
    for candidate in question.candidates:
        if (kind := _kind(candidate.prediction, math.inf if held is None else held)) is not None:
            kinds[kind].append(candidate)
    eligible = next(filter(None, kinds), [])
    if not eligible:
        reason = "abstains: no candidate is predicted to be faster"
        return Verdict(choice=None, reason=reason, judge="rules")

    def upper_end(candidate: Candidate) -> tuple[float, str]:
        high = candidate.prediction.high_ms
        return math.inf if high is None else high, candidate.id

    best = min(eligible, key=upper_end)
    step, high = best.prediction.step_ms, best.prediction.high_ms
    if step is None or best.prediction.perplexity_ratio is None:
        reason = f"{best.label}: {best.prediction.note}"
    else:
        than = "" if held is None else f", and {held:.1f} ms for the incumbent"
        reason = (
            f"{best.label}: the lowest upper end of a predicted step, {high:.1f} ms "
            f"({step:.1f} ms expected{than})"
        )
    return Verdict(choice=best.id, reason=reason, judge="rules")


def _kind(prediction: Prediction, held_ms: float) -> int | None:
    """Return the kind of `choose_by_rules`, from 0; None: of none."""
    step_ms, low_ms = prediction.step_ms, prediction.low_ms
    if step_ms is None or low_ms is None:
        return 1
    if prediction.perplexity_ratio is None:
        return 1 if step_ms < held_ms else None
    return 0 if step_ms < held_ms else 2 if low_ms < held_ms else None


class LanguageModelJudge:
    """Judge that asks a language model; where that gives no usable answer, rules choose.

    Args:
        url: base URL, ending in /v1.
        model: its name there.
        answers: folder of stored answers.
        timeout_s: longest wait for the server.
        pause_s: before a busy server is asked again; doubles each of three times.
    """

    def __init__(
        self, url: str, model: str, answers: Path, timeout_s: float = 120, pause_s: float = 1
    ) -> None:
        self._url, self._model, self._answers = url, model, answers
        self._timeout_s, self._pause_s = timeout_s, pause_s
        self._key = os.environ.get(KEY_VARIABLE, "").strip()

    def choose(self, question: Question) -> Verdict:
        """Return the choice that the answers to both orders of the candidates agree on."""
        name = f"http: {self._model}"
        forward = sorted(question.candidates, key=lambda candidate: candidate.id)
        prompts = [prompt(question, order) for order in (forward, forward[::-1])]
        files = [self._answers / f"{self._hash(messages)[:16]}.json" for messages in prompts]
        ids = [candidate.id for candidate in forward]
        try:
            answers = [self._answer(*pair) for pair in zip(prompts, files, strict=True)]
            (choice, reason), (other, _) = (read_choice(answer, ids) for answer in answers)
        except UserError as error:
            rules = choose_by_rules(question)
            reason = f"{name} gave no usable answer ({error}); {rules.reason}"
            update = {"reason": reason, "prompts": [str(file) for file in files if file.exists()]}
            return rules.model_copy(update=update)
        if choice != other:
            reason = f"abstains: {choice} in one order of the candidates, {other} in the reverse"
            choice = ABSTAIN
        return Verdict(
            choice=None if choice == ABSTAIN else choice,
            reason=reason,
            judge=name,
            prompts=[*map(str, files)],
        )

    def _hash(self, messages: Messages) -> str:
        return sha256_of_value({"model": self._model, "messages": messages})

    def _answer(self, messages: Messages, file: Path) -> str:
        """Return the stored answer, or ask for it and store it.

        Raises:
            UserError: the server gives none.
        """
        if not file.exists():
            answer = self._ask(messages)
            write_json(file, {"model": self._model, "messages": messages, "answer": answer})
        return str(read_json(file)["answer"])

    def _ask(self, messages: Messages) -> str:
        try:
            response = self._post({"model": self._model, "messages": messages, "temperature": 0})
        except requests.Timeout:
            raise self._failure(f"no answer within {self._timeout_s:g} s") from None
        except (requests.RequestException, ValueError) as error:  # the latter of its address
            raise self._failure(type(error).__name__) from None
        reply = _object(response.content)
        complaint = reply.get("error")
        words = complaint.get("message") if isinstance(complaint, dict) else complaint
        sentence = f": {_line(self._without_key(words))}" if isinstance(words, str) else ""
        if response.status_code != 200:
            raise self._failure(f"status {response.status_code}{sentence}")
        try:
            choice = reply["choices"][0]
            content, finish = choice["message"]["content"], choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            raise self._failure(f"its reply is no chat completion{sentence}") from None
        if finish not in (None, "stop"):
            raise self._failure(f"the answer is incomplete: finish_reason {_line(str(finish))}")
        if not isinstance(content, str):
            raise self._failure("the answer has no text")
        # JSON permits half of a surrogate pair, which no file can hold
        return self._without_key(content).encode(errors="replace").decode()

    def _post(self, payload: dict[str, Any]) -> requests.Response:
        """Return the reply; a busy server is asked up to four times."""
        retry = Retry(
            3,
            read=False,
            allowed_methods=None,
            status_forcelist=(429, 502, 503),
            backoff_factor=self._pause_s,
            respect_retry_after_header=False,
            raise_on_status=False,
        )

        def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
            # as an `auth` it also keeps requests from sending a password of ~/.netrc
            if self._key:
                request.headers["Authorization"] = f"Bearer {self._key}"
            return request

        url = f"{self._url.rstrip('/')}/chat/completions"
        with requests.Session() as session:
            session.mount(self._url, HTTPAdapter(max_retries=retry))
            return session.post(
                url, json=payload, auth=authorize, timeout=self._timeout_s, allow_redirects=False
            )

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text

    def _failure(self, trouble: str) -> UserError:
        hint = f"check {KEY_VARIABLE}" if re.match("status 40[13]", trouble) else "check it"
        host = urlsplit(self._url).hostname
        return UserError(f"agent.endpoint: {host}: {trouble}; {hint}, or set agent.judge to rules")


def prompt(question: Question, candidates: Sequence[Candidate]) -> Messages:
    """Return the messages of a question, with its candidates in this order.

    The origin of a candidate is left out, since it would carry authority.
    """
    listed = []
    for candidate in candidates:
        differences = in_words(question.incumbent.strategy, candidate.strategy)
        prediction = predicted(candidate.prediction)
        listed.append(f"- {candidate.id}: {candidate.label} ({differences}); {prediction}")
    user = "\n".join([question.evidence, "", "Candidates:", *listed])
    return [{"role": "system", "content": _INSTRUCTIONS}, {"role": "user", "content": user}]


def read_choice(answer: str, offered: Sequence[str]) -> tuple[str, str]:
    """Parse choice and reason of an answer, which may wrap its JSON object in other text.

    Raises:
        UserError: no choice, several that differ, or an id that was not offered; the message holds
            none of its text.
    """
    text = re.sub(r"<think>.*?(</think>|\Z)", "", answer, flags=re.DOTALL)
    verdicts = [value for value in _objects(text) if isinstance(value.get("choice"), str)]
    choices = {value["choice"] for value in verdicts}
    if len(choices) != 1:
        raise UserError(f"the answer holds {len(choices)} choices in JSON instead of one")
    choice = choices.pop()
    if choice not in (ABSTAIN, *offered):
        raise UserError("the answer names an id that was not offered")
    reason = verdicts[0].get("reason")
    return choice, (_line(reason) if isinstance(reason, str) else "") or "gave no reason"


def _objects(text: str) -> list[dict[str, Any]]:
    """Return the outermost JSON objects in a text."""
    decoder, objects, start = json.JSONDecoder(), [], text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            objects.append(value)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return objects


def _object(body: bytes) -> dict[str, Any]:
    """Parse a reply; empty where it is no JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _line(text: str) -> str:
    """Return one printable line of bounded length."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:_LONGEST_TEXT]
