"""Records to one row per run: mean and deviation over seeds, paired comparison of quality by seed.

Two runs with the same seed start from the same weights and see the same data, so a difference is
taken seed by seed.

Step times are compared by a timing: training runs are minutes apart, in which a machine drifts by
more than strategies differ.

Every numeric field of a record is a measure. One that is computed from several fields is added to
`derived`.

The uncertainty of a paired comparison is that of the differences: Student's t with n - 1 degrees of
freedom. Times and perplexities are compared as ratios, through their logarithms.
"""

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from shardlab.config.codec_table import codec_text
from shardlab.config.contention import disturbed
from shardlab.config.run_record import Breakdown, Joined, Record, Training, Validation
from shardlab.config.strategy import Strategy, parse_strategy
from shardlab.core.errors import UserError
from shardlab.core.interval import interval_factor


def paired_difference(values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return the difference of every run to the baseline, row by row.

    Args:
        values: one row per seed or repetition, one column per run.

    Returns:
        Indexed by run: `mean`, and `low` and `high` of its 95 % interval (NaN for a single row).
    """
    # skip nothing: a value that is not finite must show in the result; inf - inf is then expected
    with np.errstate(invalid="ignore"):
        differences = values.sub(values[baseline], axis=0)
        n = len(differences)
        mean = differences.mean(skipna=False)
        deviation = differences.std(ddof=1, skipna=False)
        half = interval_factor(n) * deviation
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half})


def paired_ratio(values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return what `paired_difference` does, for the geometric mean of ratios to the baseline.

    Args:
        values: positive numbers.
    """
    with np.errstate(over="ignore"):
        return np.exp(paired_difference(np.log(values), baseline))


def verdict(low: float, high: float, none: float) -> str:
    """Compare an interval with the value of no difference: `higher`, `lower`, or `same`.

    Returns:
        `unknown` without an interval, which a single row or a diverged run does not have.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return "unknown"
    if low > none:
        return "higher"
    return "lower" if high < none else "same"


ENOUGH_SEEDS = 3
"""fewer seeds cause a warning with every table"""

_PARTS = (Training, Breakdown, Validation, Joined)
_NUMBERS = (int, float, int | None, float | None)
RECORDED = [
    name
    for part in _PARTS
    for name, field in part.model_fields.items()
    if field.annotation in _NUMBERS
]
"""numeric fields of a record: a new field becomes a measure of `comparison`"""
KINDS = ("gradients", "weights")
"""of messages"""
TIMED = [
    "repetitions",
    "step_ms",
    "step_ms_sd",
    "step_ratio",
    "step_ratio_low",
    "step_ratio_high",
    "tokens_per_s",
    "disturbed",
]
"""columns of `timings.timing_table` that stand for the times of the training runs"""


def select(records: list[Record], runs: list[str], seeds: list[int]) -> list[Record]:
    """Return the records of runs x seeds, in this order.

    Raises:
        UserError: a record of the matrix is missing or there twice.
    """
    found: dict[tuple[str, int], Record] = {}
    for record in records:
        key = (record.run, record.seed)
        if key in found:
            raise UserError(
                f"results: run {record.run!r} seed {record.seed} is there twice: "
                "collect the results again"
            )
        found[key] = record
    wanted = [(run, seed) for run in runs for seed in seeds]
    for run, seed in wanted:
        if (run, seed) not in found:
            raise UserError(
                f"results: run {run!r} seed {seed} is missing: collect the results again"
            )
    return [found[key] for key in wanted]


def measurements(records: Sequence[Record]) -> pd.DataFrame:
    """Return one row per record: run, seed, `RECORDED` and `derived`, absent ones as NaN."""
    table = pd.DataFrame(
        {
            "run": record.run,
            "seed": record.seed,
            **record.model_dump(include={*RECORDED}),
            "val_ppl": _perplexity(record),
            **derived(record),
        }
        for record in records
    )
    return table.astype({name: float for name in table.columns if name not in ("run", "seed")})


def _perplexity(record: Record) -> float | None:
    """Return the perplexity, infinity included; None of a run that diverged."""
    if record.diverged_at is not None:
        return None
    infinite = record.val_ppl is None and record.val_loss is not None
    return math.inf if infinite else record.val_ppl


def divergence(records: Sequence[Record]) -> str:
    """Return at which step seeds of a run diverged; empty if none did."""
    found = {record.seed: record.diverged_at for record in records}
    steps = [step for step in found.values() if step is not None]
    if not steps:
        return ""
    if len(found) == 1 or (len(steps) == len(found) and len(set(steps)) == 1):
        return f"diverged at step {steps[0]}"
    each = (f"{step} (seed {seed})" for seed, step in found.items() if step is not None)
    return f"diverged at step {', '.join(each)}"


def derived(record: Record) -> dict[str, float | None]:
    """Return the measures that are computed from several fields; None where one is absent."""
    estimate = record.memory_estimate_bytes or record.memory_closed_form_bytes
    return {
        **traffic(record),
        "untrained_factor": _ratio(record.untrained_ppl, _perplexity(record)),
        "memory_ratio": record.memory_growth_bytes / estimate if estimate else None,
    }


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under is not None else None


def traffic(record: Record) -> dict[str, float | None]:
    """Return bytes per rank and step and their ratio, by kind of message, from the ledger."""
    measures: dict[str, float | None] = {}
    accounts = [record.ledger[kind] for kind in KINDS]
    for kind, account in zip(KINDS, accounts, strict=True):
        raw, wire = account["bytes_raw"], account["bytes_wire"]
        measures[f"{kind}_bytes_raw"] = raw
        measures[f"{kind}_bytes_wire"] = wire
        measures[f"{kind}_ratio"] = raw / wire if wire else None
    between = sum(account["bytes_between_nodes"] for account in accounts)
    measures["bytes_between_nodes"] = between or None
    measures["collectives"] = sum(account["collectives"] for account in accounts)
    return measures


def codec_texts(strategy: Strategy) -> dict[str, str]:
    """Return codecs and error feedback of a strategy as text, by the name of their column."""
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


def uncompressed(records: Sequence[Record]) -> str:
    """Return the mean number of messages per step sent uncompressed, by reason, as JSON."""
    counts = [
        {
            f"{kind}, {reason}": count
            for kind in KINDS
            for reason, count in record.ledger[kind]["uncompressed"].items()
        }
        for record in records
    ]
    return means_by_name(counts)


def means_by_name(mappings: Sequence[dict[str, float]]) -> str:
    """Return the mean of the values of each name as JSON; a missing name counts as 0."""
    means = pd.DataFrame(mappings).fillna(0.0).mean()
    values = {str(name): float(f"{value:.4g}") for name, value in means.items()}
    return json.dumps(values, sort_keys=True)


def mean_over_seeds(values: Sequence[float | None]) -> float:
    """Return the mean; NaN if a seed has no value."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else math.nan


def seed_warning(records: Sequence[Record]) -> str | None:
    """Return the warning that is shown with every table of too few seeds."""
    count = len({record.seed for record in records})
    if count >= ENOUGH_SEEDS:
        return None
    intervals = "there is no interval" if count == 1 else "intervals are very wide"
    return (
        f"Fewer than {ENOUGH_SEEDS} seeds ({count}): {intervals}; "
        "read differences as single observations."
    )


def comparison(
    records: list[Record], timed: pd.DataFrame, runs: list[str], baseline: str
) -> pd.DataFrame:
    """Return one row per run, in the order of `runs`, indexed by run.

    Columns: strategy (its label), engine, codec, gradients_codec, weights_codec, error_feedback,
    seeds, divergence (words, or empty), training_disturbed (whether others used CPUs of any seed),
    comm_ms_by_op, comm_ms_by_unit and uncompressed (JSON texts); `TIMED` and the `flops_share` of
    the timed steps; for each other measure of the records its mean under its own name and its
    standard deviation as `NAME_sd`; `ppl_ratio` and `bits_per_byte_difference` to the baseline,
    each with `_low` and `_high`.

    Args:
        timed: rows of `timings.timing_table` of one timing of all runs.
    """
    table = measurements(records)
    replaced = {"run", "seed", "flops_share", *TIMED}
    measures = [name for name in table.columns if name not in replaced]
    grouped = table.groupby("run")[measures]
    by_run = {run: [record for record in records if record.run == run] for run in runs}
    index = pd.Index(runs, name="run")
    steps, mean = timed.set_index("run").loc[runs], grouped.mean(skipna=False)
    parts = [
        pd.DataFrame([_description(found) for found in by_run.values()], index=index),
        steps[TIMED],
        _flops_share(steps, mean).to_frame("flops_share"),
    ]
    deviation = grouped.std(ddof=1, skipna=False)
    for name in measures:
        parts.append(pd.DataFrame({name: mean[name], f"{name}_sd": deviation[name]}))
    for name, compare, measure in (
        ("ppl_ratio", paired_ratio, "val_ppl"),
        ("bits_per_byte_difference", paired_difference, "val_bits_per_byte"),
    ):
        paired = compare(table.pivot(index="seed", columns="run", values=measure), baseline)
        ends = {"mean": name, "low": f"{name}_low", "high": f"{name}_high"}
        parts.append(paired.rename(columns=ends))
    return pd.concat([part.reindex(runs) for part in parts], axis=1)


def _flops_share(steps: pd.DataFrame, mean: pd.DataFrame) -> pd.Series:
    """Return model FLOPs per second of the timed steps over those of matrix products."""
    available = steps["world_size"] * mean["product_flops_per_s"]
    return mean["flops_per_token"] * steps["tokens_per_s"] / available


def _description(records: Sequence[Record]) -> dict[str, Any]:
    """Return the columns on one run that are no measures."""
    strategy = parse_strategy(records[0].strategy)
    return {
        "strategy": strategy.label(),
        "engine": strategy.engine,
        "codec": strategy.gradients.codec.name,
        **codec_texts(strategy),
        "seeds": len(records),
        "divergence": divergence(records),
        "training_disturbed": any(disturbed(record.contention) for record in records),
        "comm_ms_by_op": means_by_name([record.comm_ms_by_op for record in records]),
        "comm_ms_by_unit": means_by_name([record.comm_ms_by_unit for record in records]),
        "uncompressed": uncompressed(records),
    }


def loss_curves(
    losses: dict[str, dict[int, dict[int, float]]], diverged: set[tuple[str, int]]
) -> pd.DataFrame:
    """Return the training loss in long form: run, step, mean and standard deviation over seeds.

    Args:
        losses: run -> seed -> step -> nats per token.
        diverged: runs and seeds that stopped early; the mean of their run is NaN from there on.

    Raises:
        UserError: other seeds of one run with different steps.
    """
    parts = []
    for run, seeds in losses.items():
        table = pd.DataFrame(seeds).sort_index()
        whole = [steps for seed, steps in seeds.items() if (run, seed) not in diverged]
        if any(set(steps) != set(table.index) for steps in whole):
            raise UserError(f"events of run {run!r}: the seeds have different steps: train again")
        means, deviations = table.mean(axis=1, skipna=False), table.std(axis=1, skipna=False)
        curve = {"run": run, "step": table.index, "loss": means, "sd": deviations}
        parts.append(pd.DataFrame(curve))
    return pd.concat(parts, ignore_index=True)
