"""The few numbers of a comparison that a metrics tool shows side by side between experiments."""

import math
from typing import Any

import pandas as pd

from shardlab.agent.records.history import History

_NUMBERS = {
    "step_ms": "step_ms_mean",
    "step_ratio": "step_ratio",
    "bytes_wire": "bytes_wire",
    "compression_ratio": "compression_ratio",
    "val_ppl": "val_ppl",
    "val_bits_per_byte": "val_bits_per_byte",
}


def summary(compared: pd.DataFrame, history: History) -> dict[str, Any]:
    """Per run its main figures (null where not finite), and what the search came to."""
    return {
        "runs": {
            str(run): {name: _number(row[column]) for name, column in _NUMBERS.items()}
            for run, row in compared.iterrows()
        },
        "agent": {
            "strategy": history.incumbent.strategy.label(),
            "hash": history.incumbent.hash,
            "source": history.incumbent.source,
            "rounds": len(history.rounds),
        },
    }


def comparison_rows(compared: pd.DataFrame) -> list[dict[str, Any]]:
    """`aggregate.comparison` as JSON values, one mapping per run."""
    return [
        {str(k): _number(v) if isinstance(v, float) else v for k, v in row.items()}
        for row in compared.reset_index().to_dict("records")
    ]


def _number(value: float) -> float | None:
    """Ten significant digits: what is beyond differs between processors, not between runs."""
    return float(f"{value:.10g}") if math.isfinite(value) else None
