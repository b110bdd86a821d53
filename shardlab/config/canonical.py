"""Canonical form of parameters: plain data that is equal for equal meanings."""

from typing import Any

from shardlab.config.experiment import Params
from shardlab.core.document import Document
from shardlab.strategy.document import Strategy


def canonical(values: Params) -> dict[str, Any]:
    """Return all sections with every default written out, strategies in canonical form, and the
    tokenizer that null stands for; a round holds the settings of its search."""
    tree = {name: _plain(getattr(values, name)) for name in Params.model_fields}
    tree["tokenize"] = _plain(values.tokenize.for_model(values.model.pretrained))
    for number in values.rounds:
        tree["rounds"][number]["agent"] = _plain(values.agent_of(number))
    return tree


def _plain(value: Any) -> Any:
    match value:
        case Strategy():
            return value.canonical().model_dump(mode="json")
        case Document():
            return value.model_dump(mode="json")
        case dict():
            return {key: _plain(value[key]) for key in sorted(value)}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value
