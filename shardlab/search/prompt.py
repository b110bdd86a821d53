"""Prompts of a language model that judges: instructions, evidence, candidates and the schema of the
answer."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardlab.config.codec_table import all_specs
from shardlab.config.strategy import Strategy
from shardlab.core.files import sha256_of_value
from shardlab.search.changes import changes, in_words
from shardlab.search.evidence import predicted
from shardlab.search.judge import Question
from shardlab.search.rounds import Candidate

Schema = dict[str, Any]
Messages = list[dict[str, str]]

ABSTAIN = "abstain"

_TYPES = {"null": "unset", "boolean": "true, false", "array": "list"}
_INSTRUCTIONS = (
    "You help to search for the strategy with the shortest training step. You are given "
    "measurements and a list of candidates, each with an id, the settings in which it differs from "
    "the incumbent, and what a performance model predicts of it. The order of the list has no "
    "meaning. Choose the one candidate that should be raced against the incumbent next, or abstain "
    "when the measurements give no ground for a choice. "
    'Answer with one JSON object: {"reason": "at most two sentences that cite measurements", '
    '"choice": "the id of a candidate, or abstain"}.'
)


@dataclass(frozen=True)
class Prompt:
    """Everything that a language model is sent for one answer."""

    system: str
    user: str
    ids: tuple[str, ...]
    """that the answer may choose, in the order of the list"""

    @classmethod
    def of(cls, question: Question, candidates: Sequence[Candidate]) -> "Prompt":
        """Return the prompt of a question, with its candidates in the given order."""
        listed = "\n".join(f"- {each.id}: {_told(question, each)}" for each in candidates)
        return cls(
            system=f"{_INSTRUCTIONS}\n\n{settings_in_words()}",
            user=f"{question.evidence}\n\nCandidates:\n{listed}",
            ids=tuple(each.id for each in candidates),
        )

    def after(self, fault: str) -> "Prompt":
        """Return the prompt that asks again after an invalid answer."""
        again = f"An earlier answer was invalid: {fault}. Answer with the JSON object alone."
        return replace(self, user=f"{self.user}\n\n{again}")

    @property
    def hash(self) -> str:
        """SHA-256 of all that is sent."""
        return sha256_of_value(asdict(self))

    @property
    def messages(self) -> Messages:
        """Messages of a chat."""
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.user},
        ]

    @property
    def schema(self) -> Schema:
        """JSON schema of the answer: the reason precedes the choice, so that a model reasons
        first."""
        return {
            "type": "object",
            "properties": {
                "reason": {"type": "string"},
                "choice": {"type": "string", "enum": [*self.ids, ABSTAIN]},
            },
            "required": ["reason", "choice"],
            "additionalProperties": False,
        }


def _told(question: Question, candidate: Candidate) -> str:
    """Return a candidate by one template; its origin is left out, since it would carry
    authority."""
    found = changes(question.incumbent.strategy, candidate.strategy)
    return f"{candidate.label} ({in_words(found)}); {predicted(candidate.prediction)}"


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
