"""Records to one row per run: mean and deviation over seeds, paired comparison of quality by seed.

Two runs with the same seed start from the same weights and see the same data, so a difference is
taken seed by seed. Its uncertainty is that of the differences: Student's t with n - 1 degrees of
freedom. Perplexities and times are compared as ratios, through their logarithms.

Step times are compared by a timing: training runs are minutes apart, in which a machine drifts by
more than strategies differ.

Every numeric field of a record is a measure. One that is computed from several fields is added to
`derived`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from shardlab.core.errors import UserError
from shardlab.results.interval import interval_factor
from shardlab.results.result import Breakdown, Result, only
from shardlab.results.train_result import Joined, Training, TrainResult, Validation
from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.document import Strategy, parse_strategy

ENOUGH_SEEDS = 3
"""fewer seeds cause a warning with every table"""
KINDS = ("gradients", "weights")
"""of messages"""
TIMED = [
    "repetitions",
    "paused",
    "step_ms",
    "step_ms_sd",
    "step_ratio",
    "step_ratio_low",
    "step_ratio_high",
    "tokens_per_s",
    "disturbed",
]
"""columns of `timings.timing_table` that stand for the times of the training runs"""
_NUMBERS = (int, float, int | None, float | None)
_RECORDED = [
    name
    for part in (Training, Breakdown, Validation, Joined)
    for name, field in part.model_fields.items()
    if field.annotation in _NUMBERS
]
_QUALITY = ("train_loss", "val_loss", "val_ppl", "val_bits_per_byte")
_TRACED = [name for name in _RECORDED if name in Breakdown.model_fields]


def paired_difference(values: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Return the difference of every run to a reference, row by row.

    Args:
        values: one row per seed, one column per run, of which the reference is one.

    Returns:
        Indexed by run: `mean`, and `low` and `high` of its 95 % interval (NaN for a single row).
    """
    # skip nothing: a value that is not finite must show in the result; inf - inf is then expected
    with np.errstate(invalid="ignore"):
        differences = values.sub(values[reference], axis=0)
        mean = differences.mean(skipna=False)
        half = interval_factor(len(values)) * differences.std(ddof=1, skipna=False)
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half})


def paired_ratio(values: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Return what `paired_difference` does, for the geometric mean of ratios to the reference.

    Args:
        values: positive numbers.
    """
    with np.errstate(over="ignore"):
        return np.exp(paired_difference(np.log(values), reference))


def select(
    results: Iterable[Result], runs: Sequence[str], seeds: Sequence[int]
) -> list[TrainResult]:
    """Return the records of runs x seeds, in this order.

    Raises:
        UserError: a record of the matrix is missing.
    """
    by_key = {(result.run, result.seed): result for result in only(results, TrainResult)}
    wanted = [(run, seed) for run in runs for seed in seeds]
    for run, seed in wanted:
        if (run, seed) not in by_key:
            raise UserError(f"results: run {run!r} seed {seed} is missing: run shardlab collect")
    return [by_key[key] for key in wanted]


def measurements(records: Sequence[TrainResult]) -> pd.DataFrame:
    """Return one row per record, by run and seed: all measures, absent ones as NaN."""
    rows = [
        {**record.model_dump(include={*_RECORDED}), **_quality(record), **derived(record)}
        | ({} if shows_rounds(record.strategy) else dict.fromkeys(_TRACED))
        for record in records
    ]
    keys = [(record.run, record.seed) for record in records]
    return pd.DataFrame(rows, pd.MultiIndex.from_tuples(keys, names=["run", "seed"]), dtype=float)


def shows_rounds(strategy: Mapping[str, Any]) -> bool:
    """Return whether the traced steps of a strategy are like all: with exchanges that are too rare
    to be traced, most of its communication is missing there."""
    sync = parse_strategy(strategy).sync
    return sync is None or sync.whole_rounds(1) is not None


def _quality(record: TrainResult) -> dict[str, float | None]:
    """Return the measures of quality that are not as recorded: a perplexity beyond the largest
    number is infinite, and a run that diverged has none, although its last weights may be finite.
    """
    if record.diverged_at is not None:
        return dict.fromkeys(_QUALITY)
    infinite = record.val_ppl is None and record.val_loss is not None
    return {"val_ppl": math.inf if infinite else record.val_ppl}


def derived(record: TrainResult) -> dict[str, float | None]:
    """Return the measures that are computed from several fields; None where one is absent.

    Bytes are per rank and step, by kind of message, from the ledger.
    """
    accounts = [record.ledger[kind] for kind in KINDS]
    measures: dict[str, float | None] = {
        "collectives": sum(account["collectives"] for account in accounts),
        "bytes_between_nodes": sum(account["bytes_between_nodes"] for account in accounts) or None,
        "untrained_factor": _ratio(record.untrained_ppl, _quality(record)["val_ppl"]),
        "memory_ratio": _ratio(record.memory_growth_bytes, record.memory_estimate_bytes),
    }
    for kind, account in zip(KINDS, accounts, strict=True):
        raw, wire = account["bytes_raw"], account["bytes_wire"]
        measures[f"{kind}_bytes_raw"], measures[f"{kind}_bytes_wire"] = raw, wire
        measures[f"{kind}_ratio"] = _ratio(raw, wire)
    return measures


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def divergence(records: Sequence[TrainResult]) -> str:
    """Return at which step seeds of a run diverged; empty if none did."""
    steps = {r.seed: r.diverged_at for r in records if r.diverged_at is not None}
    if not steps:
        return ""
    if len(steps) == len(records) and len(set(steps.values())) == 1:
        return f"diverged at step {steps.popitem()[1]}"
    by_seed = ", ".join(f"{step} (seed {seed})" for seed, step in steps.items())
    return f"diverged at step {by_seed}"


def codec_texts(strategy: Strategy) -> dict[str, str]:
    """Return codecs and error feedback of a strategy as text, by the name of their column."""
    full = strategy.canonical()
    gradients = full.gradients
    codecs = [codec_text(gradients.codec)]
    if gradients.between_nodes is not None:
        codecs.append(f"{codec_text(gradients.between_nodes)} between nodes")
    if full.sync is not None:
        codecs.append(f"{codec_text(full.sync.codec)} in exchanges")
    return {
        "gradients_codec": ", ".join(codecs),
        "weights_codec": codec_text(full.weights.codec) if full.weights else "none",
        "error_feedback": gradients.residual if gradients.error_feedback else "none",
    }


def means_by_name(mappings: Sequence[Mapping[str, float]]) -> str:
    """Return the mean of the values of each name as JSON; a missing name counts as 0."""
    means = pd.DataFrame(mappings).fillna(0.0).mean()
    values = {str(name): float(f"{value:.4g}") for name, value in means.items()}
    return json.dumps(values, sort_keys=True)


def _description(records: Sequence[TrainResult]) -> dict[str, Any]:
    """Return the columns on one run that are no measures."""
    strategy = parse_strategy(records[0].strategy)
    uncompressed = [
        {
            f"{kind}, {reason}": count
            for kind in KINDS
            for reason, count in record.ledger[kind]["uncompressed"].items()
        }
        for record in records
    ]
    return {
        "strategy": strategy.label(),
        "engine": strategy.engine,
        **codec_texts(strategy),
        "seeds": len(records),
        "divergence": divergence(records),
        "comm_ms_by_op": means_by_name([record.comm_ms_by_op for record in records]),
        "uncompressed": means_by_name(uncompressed),
    }


def comparison(records: Sequence[TrainResult], timed: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return one row per run, in their order, indexed by run.

    Columns: strategy (its label), engine, gradients_codec, weights_codec, error_feedback, seeds,
    divergence (words, or empty), comm_ms_by_op and uncompressed (JSON texts); `TIMED` and the
    `flops_share` of the timed steps; for each other measure of the records its mean under its own
    name and its standard deviation as `NAME_sd`; what `costs` returns.

    Args:
        timed: rows of `timings.timing_table` of one timing; values of a run that it lacks are NaN.
    """
    by_run: dict[str, list[TrainResult]] = {}
    for record in records:
        by_run.setdefault(record.run, []).append(record)
    index = pd.Index(by_run, name="run")
    steps = timed.set_index("run").reindex(index)
    table = measurements(records)
    by_seed = table.drop(columns=["flops_share", *TIMED], errors="ignore").groupby(level="run")
    mean, deviation = by_seed.mean(skipna=False), by_seed.std(ddof=1, skipna=False)
    # model FLOPs per second of the timed steps over those of matrix products on all ranks
    available = steps["world_size"] * pd.Series(_product_peaks(records))
    flops_share = mean["flops_per_token"] * steps["tokens_per_s"] / available
    parts = [
        pd.DataFrame([_description(runs) for runs in by_run.values()], index=index),
        steps[TIMED],
        flops_share.to_frame("flops_share"),
        mean,
        deviation.add_suffix("_sd"),
        costs(table, baseline),
    ]
    # without a copy pandas warns of a table of many blocks
    return pd.concat([part.reindex(index) for part in parts], axis=1).copy()


def _product_peaks(records: Sequence[TrainResult]) -> dict[str, float]:
    """Return by run the FLOP/s of matrix products on one rank: the most that any run of as many
    ranks measured in the same dtype, since matrix products are slower where others use the cores.
    """
    kinds = {
        record.run: (record.world_size, str(record.strategy.get("param_dtype")))
        for record in records
    }
    peaks: dict[tuple[int, str], float] = {}
    for record in records:
        kind = kinds[record.run]
        peaks[kind] = max(record.product_flops_per_s, peaks.get(kind, 0.0))
    return {run: peaks[kind] for run, kind in kinds.items()}


def costs(table: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return what runs cost, seed by seed: `ppl_ratio` to the baseline and `memory_change` of the
    peak from it, bytes, each with `_low` and `_high`.

    Args:
        table: of `measurements`.
    """
    perplexity, memory = (table[name].unstack("run") for name in ("val_ppl", "memory_peak_bytes"))
    parts = paired_ratio(perplexity, baseline), paired_difference(memory, baseline)
    return pd.concat([*map(with_ends, parts, ("ppl_ratio", "memory_change"))], axis=1)


def with_ends(ratios: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rename `mean`, `low` and `high` to NAME, NAME_low and NAME_high."""
    return ratios.set_axis([name, f"{name}_low", f"{name}_high"], axis=1)


def seed_warning(records: Sequence[TrainResult]) -> str | None:
    """Return the warning that is shown with every table of too few seeds."""
    count = len({record.seed for record in records})
    if count >= ENOUGH_SEEDS:
        return None
    intervals = "there is no interval" if count == 1 else "intervals are very wide"
    return (
        f"Fewer than {ENOUGH_SEEDS} seeds ({count}): {intervals}; "
        "read differences as single observations."
    )


def loss_curves(losses: Mapping[str, Mapping[int, pd.Series]]) -> pd.DataFrame:
    """Return losses in long form: run, step, mean and standard deviation over seeds.

    From the step on at which a seed has stopped, they are NaN.

    Args:
        losses: nats per token by step, of each run and seed.
    """
    parts = []
    for run, seeds in losses.items():
        table = pd.DataFrame(seeds).sort_index()
        curve = {"loss": table.mean(axis=1, skipna=False), "sd": table.std(axis=1, skipna=False)}
        parts.append(pd.DataFrame({"run": run, "step": table.index, **curve}))
    return pd.concat(parts, ignore_index=True)
