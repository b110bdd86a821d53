"""What moved between the ranks, from the strategy and the ledger of a record."""

import json
import math

import pandas as pd

from shardlab.records.run import Record
from shardlab.strategy.codec_spec import codec_text
from shardlab.strategy.strategy import Strategy

KINDS = ("gradients", "weights")
TRAFFIC_MEASURES = [
    *(f"{kind}_{what}" for kind in KINDS for what in ("bytes_raw", "bytes_wire", "ratio")),
    "bytes_between_nodes",
    "collectives",
]
"""numeric measures that `traffic` gives"""


def traffic(record: Record) -> dict[str, float]:
    """Bytes per rank and step and their ratio, by kind of message; NaN where nothing moved so."""
    measures: dict[str, float] = {}
    accounts = [record.ledger[kind] for kind in KINDS]
    for kind, account in zip(KINDS, accounts, strict=True):
        raw, wire = account["bytes_raw"], account["bytes_wire"]
        measures[f"{kind}_bytes_raw"] = raw
        measures[f"{kind}_bytes_wire"] = wire
        measures[f"{kind}_ratio"] = raw / wire if wire else math.nan
    between = sum(account["bytes_between_nodes"] for account in accounts)
    measures["bytes_between_nodes"] = between or math.nan
    measures["collectives"] = sum(account["collectives"] for account in accounts)
    return measures


def travel(strategy: Strategy) -> dict[str, str]:
    """Codecs and error feedback of a strategy in words, by the name of their column."""
    full = strategy.canonical()
    gradients = full.gradients
    codecs = [codec_text(gradients.codec)]
    if gradients.between_nodes is not None:
        codecs.append(f"{codec_text(gradients.between_nodes)} between nodes")
    return {
        "gradients_codec": ", ".join(codecs),
        "weights_codec": codec_text(full.weights.codec) if full.weights else "none",
        "error_feedback": gradients.residual if gradients.error_feedback else "none",
    }


def uncompressed(records: list[Record]) -> str:
    """Mean over records of the messages per step that no codec touched, by reason, as JSON."""
    counts = [
        {
            f"{kind}, {reason}": count
            for kind in KINDS
            for reason, count in record.ledger[kind]["uncompressed"].items()
        }
        for record in records
    ]
    return means_by_name(counts)


def means_by_name(mappings: list[dict[str, float]]) -> str:
    """The mean of each name's values as JSON; a name that a mapping lacks counts as 0 there."""
    means = pd.DataFrame(mappings).fillna(0.0).mean()
    values = {str(name): float(f"{value:.4g}") for name, value in means.items()}
    return json.dumps(values, sort_keys=True)
