"""Strategies as a user writes them: without what is the default anyway."""

from typing import Any

from shardlab.config.codec_table import codec_text
from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.core.errors import UserError

Part = dict[str, Any]


def written(strategy: CanonicalStrategy) -> Part:
    """Return a strategy as plain data: its engine, and the settings that its meaning needs."""
    document = strategy.model_dump(mode="json")
    gradients, weights = strategy.gradients, strategy.weights
    document["gradients"]["codec"] = codec_text(gradients.codec)
    if gradients.between_nodes is not None:
        document["gradients"]["between_nodes"] = codec_text(gradients.between_nodes)
    if weights is not None:
        document["weights"]["codec"] = codec_text(weights.codec)
    _shorten(document, document, strategy.hash())
    return {"engine": strategy.engine} | document


def _shorten(part: Part, document: Part, meaning: str) -> None:
    """Remove the settings of a part without which the document has the same hash."""
    for key in [*part]:
        value = part.pop(key)
        if _hash(document) == meaning:
            continue
        part[key] = value
        if isinstance(value, dict):
            _shorten(value, document, meaning)


def _hash(document: Part) -> str | None:
    try:
        return parse_strategy(document).hash()
    except UserError:
        return None
