"""Strategies of `params/search.yaml`, the table on which policies of a search are compared.

    python -m benchmarks.search_table

prints the sections `strategies` and `timed_strategies` of that file. The rule: every engine with
every gradient codec of `forecast.space`; compressed weights with three of these; each other setting
of the grid by itself, with one codec and without. Trained are the engines without a codec, and one
of them with every codec: perplexity is that of the codecs.
"""

from collections.abc import Iterator
from typing import Any

import yaml

from shardlab.config.codec_table import codec_text
from shardlab.config.engine_traits import ENGINES, accepts_codec
from shardlab.config.schema import Space
from shardlab.config.strategy import parse_strategy
from shardlab.config.validation import check_fits
from shardlab.core.errors import UserError

Document = dict[str, Any]

_SETTINGS: dict[str, Document] = {
    "1mb": {"bucket_mb": 1.0},
    "5mb": {"bucket_mb": 5.0},
    "root": {"wrap": "root"},
    "kept": {"reshard_after_forward": False},
    "ahead0": {"prefetch": 0},
    "ahead1": {"prefetch": 1},
    "replicated": {"sharding": "no_shard"},
    "parts": {"param_transfer": "shard"},
    "device": {"grad_sync": "gpu_reduce"},
    "parts-device": {"param_transfer": "shard", "grad_sync": "gpu_reduce"},
}
_RANKS, _SAMPLES = (2, 4), 8


def strategies() -> dict[str, Document]:
    """Return the strategies of the table by name: legal ones, each meaning once."""
    found: dict[str, Document] = {}
    seen: set[str] = set()
    for words, document in _documents():
        try:
            strategy = parse_strategy(document)
            for ranks in _RANKS:
                check_fits(strategy.canonical(), ranks, _SAMPLES)
        except UserError:
            continue  # the rule names settings that an engine lacks or excludes
        if strategy.hash() not in seen:
            seen.add(strategy.hash())
            found["-".join(filter(None, words))] = document
    return found


def trained(document: Document) -> bool:
    """Return whether a strategy is one of the matrix, whose perplexity is measured."""
    engine, others = document["engine"], {*document} - {"engine"}
    exchange = "route" in document.get("gradients", {})
    coded = others <= {"gradients", "weights"} and not exchange
    return not others or (engine == "fsdp2" and coded)


def _documents() -> Iterator[tuple[tuple[str, ...], Document]]:
    """Yield the words of a name and a strategy, legal or not."""
    weights = {"weights": {"codec": codec_text(Space().weights[0])}}
    for engine in ENGINES:
        coded: dict[str, Document] = {
            "": {},
            "exchange": {"gradients": {"codec": "none", "route": "exchange"}},
        }
        for each in Space().gradients:
            if accepts_codec(engine, each.codec.name):
                feedback = {"error_feedback": True} if each.error_feedback else {}
                word = f"{each.codec.name}-few" if each.codec.name in coded else each.codec.name
                coded[word] = {"gradients": {"codec": codec_text(each.codec)} | feedback}
        for word, gradients in coded.items():
            yield (engine, word), {"engine": engine, **gradients}
        for word in ("", "int8", "int4"):
            yield (engine, word, "w8"), {"engine": engine, **coded[word], **weights}
        for setting, values in _SETTINGS.items():
            for word in ("", "int4"):
                yield (engine, word, setting), {"engine": engine, **coded[word], **values}


def main() -> None:
    for section, of_matrix in (("strategies", True), ("timed_strategies", False)):
        print(f"{section}:")
        for name, document in strategies().items():
            if trained(document) == of_matrix:
                print(f"  {name}: {_in_one_line(document)}")


def _in_one_line(document: Document) -> str:
    return yaml.safe_dump(document, default_flow_style=True, sort_keys=False, width=1000).strip()


if __name__ == "__main__":
    main()
