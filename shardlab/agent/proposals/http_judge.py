"""A language model as judge: it picks one of the offered ids, and is asked in both orders.

Models favour places in a list. So each question is asked with the candidates in one order and in
the reverse of it; only a choice that both answers agree on counts (Zheng et al. 2023, "Judging
LLM-as-a-judge", section 3.4). Every answer is kept, and a question that was ever answered is never
sent again: a rerun needs no server.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlab.agent.proposals.changes import changes, in_words
from shardlab.agent.proposals.endpoint import Endpoint, Messages
from shardlab.agent.proposals.evidence import predicted
from shardlab.agent.proposals.judge import Judge, Question
from shardlab.agent.records.rounds import Candidate, Verdict
from shardlab.core.document import Document
from shardlab.core.files import sha256_of_value
from shardlab.strategy.codec_table import all_specs
from shardlab.strategy.strategy import Strategy

Schema = dict[str, Any]

_TYPES = {"null": "unset", "boolean": "true, false", "array": "list"}

ABSTAIN = "abstain"

_LONGEST_REASON = 500

_INSTRUCTIONS = (
    "You help to search for the strategy with the shortest training step. You are given "
    "measurements and a list of candidates, each with an id, the settings in which it differs from "
    "the incumbent, and what a performance model predicts of it. The order of the list has no "
    "meaning. Choose the one candidate that should be raced against the incumbent next, or abstain "
    "when the measurements give no ground for a choice. "
    'Answer with one JSON object: {"reason": "at most two sentences that cite measurements", '
    '"choice": "the id of a candidate, or abstain"}.'
)


class Stored(Document):
    """One stored answer."""

    model: str
    dialect: str
    """dialect of the request: json_schema, json_object or text"""
    order: list[str]
    """ids in the order of the list"""
    messages: list[dict[str, str]]
    answer: str | None
    """text of the model; null when the server's reply was no chat completion"""


class InvalidAnswerError(ValueError):
    """Answer without a valid choice; the message holds none of its text."""


class HttpJudge(Judge):
    """Judge that asks `endpoint`; disagreement between orders or an invalid answer is an
    abstention.

    Args:
        endpoint: the model.
        store: folder of the answers, `<sha256>.json` by model, messages, schema and order.
    """

    def __init__(self, endpoint: Endpoint, store: Path) -> None:
        self.name = f"http: {endpoint.model}"
        self._endpoint = endpoint
        self._store = store

    def choose(self, question: Question) -> Verdict:
        """Return the verdict; raise `UserError` without an answer, so that a rerun asks again."""
        forward = sorted(question.candidates, key=lambda candidate: candidate.id)
        try:
            choice, reason = self._answer(question, forward)
            reverse_choice, _ = self._answer(question, forward[::-1])
        except InvalidAnswerError as error:
            return self._verdict(None, f"abstains: {error}", "answer")
        if choice != reverse_choice:
            return self._verdict(
                None,
                f"abstains: {choice} in one order of the candidates, "
                f"{reverse_choice} in the reverse order",
                "order",
            )
        return self._verdict(None if choice == ABSTAIN else choice, reason)

    def _answer(self, question: Question, candidates: list[Candidate]) -> tuple[str, str]:
        order = [candidate.id for candidate in candidates]
        model, messages, schema = (
            self._endpoint.model,
            _messages(question, candidates),
            _schema(order),
        )
        identity = {"model": model, "messages": messages, "schema": schema, "order": order}
        path = self._store / f"{sha256_of_value(identity)}.json"
        if path.exists():
            return read_choice(_replay(path), order)
        answer = self._endpoint.complete(messages, schema)
        stored = Stored(
            model=model,
            dialect=self._endpoint.dialect,
            order=order,
            messages=messages,
            answer=answer,
        )
        stored.to_file(path)
        return read_choice(answer, order)


def read_choice(answer: str | None, offered: list[str]) -> tuple[str, str]:
    """Parse choice and reason of an answer, which may wrap its JSON object in other text.

    Raises:
        InvalidAnswerError: no choice, several that differ, or an id that was not offered.
    """
    if answer is None:
        raise InvalidAnswerError("the server's reply was no chat completion")
    verdicts = [each for each in _objects(answer) if isinstance(each.get("choice"), str)]
    choices = {each["choice"] for each in verdicts}
    if len(choices) != 1:
        raise InvalidAnswerError(f"the answer holds {len(choices)} choices instead of one")
    choice = choices.pop()
    if choice != ABSTAIN and choice not in offered:
        raise InvalidAnswerError("the answer names an id that was not offered")
    return choice, _tame(verdicts[0].get("reason"))


def _objects(text: str) -> list[dict[str, Any]]:
    """Yield the outermost JSON objects in a text."""
    decoder, found, start = json.JSONDecoder(), [], text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            found.append(value)
        start = text.find("{", end)
    return found


def _tame(reason: Any) -> str:
    """Return one printable line of bounded length."""
    if not isinstance(reason, str):
        return "gave no reason"
    line = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
    return line[:_LONGEST_REASON] or "gave no reason"


def _replay(path: Path) -> str | None:
    return Stored.from_file(path, "delete it").answer


def _messages(question: Question, candidates: list[Candidate]) -> Messages:
    listed = "\n".join(f"- {each.id}: {_in_words(question, each)}" for each in candidates)
    return [
        {"role": "system", "content": f"{_INSTRUCTIONS}\n\n{settings_in_words()}"},
        {"role": "user", "content": f"{question.evidence}\n\nCandidates:\n{listed}"},
    ]


def _in_words(question: Question, candidate: Candidate) -> str:
    """Return the candidates by one template; their origin is left out, since it would carry
    authority."""
    found = changes(question.incumbent.strategy, candidate.strategy)
    return f"{candidate.label} ({in_words(found)}); {predicted(candidate.prediction)}"


def _schema(ids: list[str]) -> dict[str, Any]:
    """Return the JSON schema: the reason precedes the choice, so that a model reasons first."""
    return {
        "type": "object",
        "properties": {
            "reason": {"type": "string"},
            "choice": {"type": "string", "enum": [*ids, ABSTAIN]},
        },
        "required": ["reason", "choice"],
        "additionalProperties": False,
    }


def settings_in_words() -> str:
    """Return one line per setting with its values and meaning, then one per codec with its options.

    `gradients.residual: fp32, bf16, int8. type in which error feedback stores residuals`
    """
    schema = Strategy.model_json_schema()
    codecs = [_codec(name, spec.model_json_schema()) for name, spec in all_specs().items()]
    return "\n".join(["Settings:", *_settings(schema, schema["$defs"]), "Codecs:", *codecs])


def _settings(schema: Schema, definitions: dict[str, Schema], path: str = "") -> Iterator[str]:
    for name, field in schema["properties"].items():
        listed = "$ref" in field.get("items", {})
        kinds = [field["items"]] if listed else _kinds(field)
        nested = next((each["$ref"] for each in kinds if "$ref" in each), None)
        if nested is not None:
            definition = definitions[nested.rpartition("/")[2]]
            yield from _settings(definition, definitions, f"{path}{name}{'[]' * listed}.")
        else:
            meaning = " ".join(field.get("description", "").split())
            yield f"{path}{name}: {'. '.join(filter(None, [_values(field), meaning]))}"


def _codec(name: str, schema: Schema) -> str:
    options = [
        f"{key} ({_values(field)})" for key, field in schema["properties"].items() if key != "name"
    ]
    return f"{name}: {' '.join(filter(None, [schema['description'], ', '.join(options)]))}"


def _kinds(field: Schema) -> list[Schema]:
    found: list[Schema] = field.get("anyOf", [field])
    found = [kind for each in found for kind in each.get("anyOf", [each])]
    # a codec may also be written as text, or be registered by the user
    coded = any("oneOf" in kind for kind in found)
    return [kind for kind in found if not (coded and kind.get("type") in ("string", "object"))]


def _values(field: Schema) -> str:
    """Return the values as `block, root, unset`."""
    return ", ".join(_value(kind) for kind in _kinds(field))


def _value(kind: Schema) -> str:
    if "enum" in kind:
        return ", ".join(map(str, kind["enum"]))
    name = str(kind.get("type"))
    return "a codec" if "oneOf" in kind else _TYPES.get(name, name)
