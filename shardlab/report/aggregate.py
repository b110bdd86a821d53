"""From records to one row per run: mean and deviation over seeds, paired comparison by seed.

Two runs with the same seed start from the same weights and see the same data, so a difference is
taken seed by seed, and its uncertainty is that of these differences: Student's t with n - 1 degrees
of freedom. Times and perplexities are compared as ratios, through their logarithms.
"""

import math

import numpy as np
import pandas as pd

from shardlab.core.errors import UserError
from shardlab.records.run import Record
from shardlab.report.traffic import TRAFFIC_MEASURES, means_by_name, traffic, travel, uncompressed
from shardlab.statistics.interval import interval_factor
from shardlab.strategy.strategy import parse_strategy

ENOUGH_SEEDS = 3
"""fewer seeds than this are announced wherever their figures stand"""

MEASURES = [
    "step_ms_mean",
    "step_ms_p50",
    "step_ms_p90",
    "step_ms_p95",
    "tokens_per_s",
    "bytes_raw",
    "bytes_wire",
    "compression_ratio",
    "collective_ms",
    "effective_bandwidth_raw",
    "effective_bandwidth_wire",
    *TRAFFIC_MEASURES,
    "index_bytes",
    "metadata_bytes",
    "density",
    "encode_ms",
    "decode_ms",
    "extra_collectives",
    "extra_collective_ms",
    "residual_norm",
    "grad_rel_error",
    "grad_cosine",
    "memory_peak_bytes",
    "memory_growth_bytes",
    "memory_reserved_bytes",
    "memory_estimate_bytes",
    "memory_closed_form_bytes",
    "memory_ratio",
    "product_flops_per_s",
    "flops_share",
    "scaling_efficiency",
    "clipped_steps",
    "skipped_steps",
    "invalid_steps",
    "profiled_step_ms",
    "compute_ms",
    "comm_ms_per_step",
    "comm_share",
    "comm_skew_ms",
    "comm_transfer_ms",
    "exposed_comm_ms",
    "overlap",
    "copy_ms",
    "exposed_copy_ms",
    "idle_ms",
    "forward_ms",
    "backward_ms",
    "backward_comm_share",
    "update_ms",
    "train_loss",
    "val_loss",
    "val_ppl",
    "val_bits_per_byte",
    "untrained_ppl",
    "untrained_factor",
]
"""numeric fields of a record, what its ledger says, the factor that training gained, and memory
over its estimate"""


def select(records: list[Record], runs: list[str], seeds: list[int]) -> list[Record]:
    """The records of runs x seeds, in this order.

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


def measurements(records: list[Record]) -> pd.DataFrame:
    """One row per record: run, seed and `MEASURES` as floats (absent ones are NaN)."""
    rows = [
        {
            **record.model_dump(),
            **traffic(record),
            "untrained_factor": record.untrained_ppl / record.val_ppl,
            "memory_ratio": _memory_ratio(record),
        }
        for record in records
    ]
    table = pd.DataFrame(rows, columns=["run", "seed", *MEASURES])
    return table.astype(dict.fromkeys(MEASURES, float))


def _memory_ratio(record: Record) -> float | None:
    """Measured growth over the traced estimate, or the closed form where there is none."""
    estimate = record.memory_estimate_bytes or record.memory_closed_form_bytes
    return record.memory_growth_bytes / estimate if estimate else None


def paired_difference(values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Difference of every run to the baseline, seed by seed.

    Args:
        values: one row per seed, one column per run.

    Returns:
        Indexed by run: `mean`, and `low` and `high` of its 95 % interval (NaN for a single seed).
    """
    # a value that is not finite has to show in the result, so nothing is skipped and inf - inf is
    # not worth a warning
    with np.errstate(invalid="ignore"):
        differences = values.sub(values[baseline], axis=0)
        n = len(differences)
        mean = differences.mean(skipna=False)
        deviation = differences.std(ddof=1, skipna=False)
        half = interval_factor(n) * deviation
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half})


def paired_ratio(values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Like `paired_difference`, for the geometric mean of the ratios to the baseline.

    Args:
        values: positive numbers.
    """
    with np.errstate(over="ignore"):
        return np.exp(paired_difference(np.log(values), baseline))


def verdict(low: float, high: float, none: float) -> str:
    """Where an interval lies: `higher` or `lower` than the value of no difference, or around it.

    Returns:
        `unknown` without an interval, which a single seed or a diverged run does not have.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return "unknown"
    if low > none:
        return "higher"
    return "lower" if high < none else "same"


def comparison(records: list[Record], runs: list[str], baseline: str) -> pd.DataFrame:
    """One row per run, in the order of `runs`, indexed by run.

    Columns: strategy (in words), engine, codec, gradients_codec, weights_codec, error_feedback,
    seeds, comm_ms_by_op, comm_ms_by_unit and uncompressed (JSON texts); for each of `MEASURES` its
    mean under its own name and its standard deviation as `NAME_sd`;
    `step_difference_ms`, `step_ratio`, `ppl_ratio` and `bits_per_byte_difference` to the baseline,
    each with `_low` and `_high`.
    """
    table = measurements(records)
    grouped = table.groupby("run")[MEASURES]
    by_run = {run: [record for record in records if record.run == run] for run in runs}
    strategies = {run: parse_strategy(found[0].strategy) for run, found in by_run.items()}
    parts = [
        pd.DataFrame(
            {
                "strategy": [strategy.label() for strategy in strategies.values()],
                "engine": [strategy.engine for strategy in strategies.values()],
                "codec": [strategy.gradients.codec.name for strategy in strategies.values()],
                **pd.DataFrame(map(travel, strategies.values())).to_dict("list"),
                "seeds": grouped.size().reindex(runs).to_numpy(),
                **{
                    name: [
                        means_by_name([getattr(record, name) for record in found])
                        for found in by_run.values()
                    ]
                    for name in ("comm_ms_by_op", "comm_ms_by_unit")
                },
                "uncompressed": [uncompressed(found) for found in by_run.values()],
            },
            index=pd.Index(runs, name="run"),
        )
    ]
    mean = grouped.mean(skipna=False)
    deviation = grouped.std(ddof=1, skipna=False)
    for name in MEASURES:
        parts.append(pd.DataFrame({name: mean[name], f"{name}_sd": deviation[name]}))
    for name, compare, measure in (
        ("step_difference_ms", paired_difference, "step_ms_mean"),
        ("step_ratio", paired_ratio, "step_ms_mean"),
        ("ppl_ratio", paired_ratio, "val_ppl"),
        ("bits_per_byte_difference", paired_difference, "val_bits_per_byte"),
    ):
        paired = compare(table.pivot(index="seed", columns="run", values=measure), baseline)
        parts.append(
            paired.rename(columns={"mean": name, "low": f"{name}_low", "high": f"{name}_high"})
        )
    return pd.concat([part.reindex(runs) for part in parts], axis=1)


def loss_curves(losses: dict[str, dict[int, dict[int, float]]]) -> pd.DataFrame:
    """Training loss in long form: run, step, mean over seeds, standard deviation over seeds.

    Args:
        losses: run -> seed -> step -> nats per token.

    Raises:
        UserError: seeds of one run with different steps.
    """
    parts = []
    for run, seeds in losses.items():
        table = pd.DataFrame(seeds).sort_index()
        if any(set(steps) != set(table.index) for steps in seeds.values()):
            raise UserError(f"events of run {run!r}: the seeds have different steps: train again")
        parts.append(
            pd.DataFrame(
                {
                    "run": run,
                    "step": table.index,
                    "loss": table.mean(axis=1, skipna=False).to_numpy(),
                    "sd": table.std(axis=1, ddof=1, skipna=False).to_numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)
