"""Metrics of a run from the measurements of its ranks."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardlab.core.device import allows_tf32
from shardlab.core.files import finite
from shardlab.core.host import CpuTimes
from shardlab.results.contention import Contention
from shardlab.results.interval import pauses
from shardlab.results.result import LinkEmulation
from shardlab.results.train_result import Setting, Training
from shardlab.train.header import header
from shardlab.train.loop import divergence_step
from shardlab.train.plans import RunPlan

Event = dict[str, Any]
_MEANS = "collective_ms", "interface_bytes", "interface_bytes_inside"
"""of an event, where they are known"""
_MOST = "memory_peak_bytes", "memory_reserved_bytes"


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of one rank; plain values, so that they can be gathered."""

    events: list[Event]
    ledger: dict[str, dict[str, Any]]
    audit: dict[str, float] | None
    residual_norm: float | None
    memory: dict[str, int | None]
    """of `MemoryMeter`"""
    flops_per_token: float
    product_flops_per_s: float
    loss_scaled: bool
    """whether fp16 scales the loss"""
    cpu_times: CpuTimes
    """of the steps that were timed"""


def describe(
    plan: RunPlan,
    dataset: str,
    parameters: int,
    link_emulation: LinkEmulation,
    placement: list[str],
) -> dict[str, Any]:
    """Return the `Setting` of a result."""
    full = plan.strategy.canonical()
    codec = full.gradients.codec.model_dump()
    return Setting(
        **header(plan, plan.run, parameters, link_emulation),
        engine=full.engine,
        dataset=dataset,
        codec=codec.pop("name"),
        codec_config=codec,
        weight_codec=full.weights.codec.name if full.weights else "none",
        error_feedback=full.gradients.error_feedback,
        params_hash=plan.params_hash(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tf32=allows_tf32(),
        placement=placement,
    ).model_dump(mode="json")


def merge_events(ranks: Sequence[Sequence[Event]]) -> list[Event]:
    """Return one event per step: means over ranks, the duration of the slowest, the memory of the
    fullest, and the norm of the residuals of all."""
    return [
        {
            **same_step[0],
            "loss": statistics.fmean(event["loss"] for event in same_step),
            "step_ms": max(event["step_ms"] for event in same_step),
            "bytes_wire": statistics.fmean(event["bytes_wire"] for event in same_step),
            **{name: _mean_if_known([event[name] for event in same_step]) for name in _MEANS},
            **_most_memory([{name: event.get(name) for name in _MOST} for event in same_step]),
            "residual_norm": _root_of_squares([event.get("residual_norm") for event in same_step]),
        }
        for same_step in zip(*ranks, strict=True)
    ]


def with_rates(plan: RunPlan, events: Sequence[Event]) -> list[Event]:
    """Return the events with the tokens per second of all ranks, null where not finite, and whether
    the machine paused; `val_loss` is in those of steps with an evaluation alone."""
    rows = []
    for event, pause in zip(events, _paused(plan, events), strict=True):
        rate = event["tokens"] / event["step_ms"] * 1e3
        row = {**event, "tokens_per_s": rate, "paused": pause}
        if row["val_loss"] is None:
            del row["val_loss"]
        rows.append(finite(row))
    return rows


def _paused(plan: RunPlan, events: Sequence[Event]) -> list[bool]:
    # rare exchanges take longer than other steps, too
    if plan.strategy.sync is not None:
        return [False] * len(events)
    return pauses([event["step_ms"] for event in events])


def summarize(
    plan: RunPlan, events: Sequence[Event], ranks: Sequence[RankMeasurements]
) -> dict[str, Any]:
    """Return the `Training` part of a record."""
    # a run that diverged in its untimed steps has no others
    timed = events[plan.train.untimed_steps :] or events
    paused = _paused(plan, events)[-len(timed) :]
    measured = [event for event, is_pause in zip(timed, paused, strict=True) if not is_pause]
    step_ms = np.array([event["step_ms"] for event in measured])
    # exchanges are few and a warm-up is none of them: a part of such a run is not like the whole
    counted = timed if plan.strategy.sync is None else events
    ledger = mean_ledger([rank.ledger for rank in ranks], len(counted))
    tail = max(1, len(events) // 10)
    tokens_per_s = sum(event["tokens"] for event in measured) / float(step_ms.sum()) * 1e3
    flops = ranks[0].flops_per_token
    products = sum(rank.product_flops_per_s for rank in ranks)
    skipped = [event for event in events if not event["applied"]]
    scaled = ranks[0].loss_scaled
    return Training(
        steps=len(events),
        diverged_at=divergence_step(events, plan.train.steps),
        contention=Contention.of([rank.cpu_times for rank in ranks]),
        paused_steps=sum(paused),
        step_ms_mean=float(step_ms.mean()),
        step_ms_p50=float(np.percentile(step_ms, 50)),
        step_ms_p90=float(np.percentile(step_ms, 90)),
        step_ms_p95=float(np.percentile(step_ms, 95)),
        tokens_per_s=tokens_per_s,
        train_loss=statistics.fmean(event["loss"] for event in events[-tail:]),
        interface_bytes=_mean_if_known([event["interface_bytes"] for event in counted]),
        interface_bytes_inside=_mean_if_known(
            [event["interface_bytes_inside"] for event in counted]
        ),
        ledger=ledger,
        bytes_peak=max(event["bytes_wire"] for event in counted),
        **_traffic(ledger, _mean_if_known([event["collective_ms"] for event in measured])),
        residual_norm=_root_of_squares([rank.residual_norm for rank in ranks]),
        **_gradient_error([rank.audit for rank in ranks]),
        **_most_memory([rank.memory for rank in ranks]),
        flops_per_token=flops,
        product_flops_per_s=products / len(ranks),
        flops_share=flops * tokens_per_s / products,
        clipped_steps=events[-1]["clipped_steps"],
        skipped_steps=events[-1]["skipped_steps"],
        invalid_steps=sum(not (scaled and math.isfinite(event["loss"])) for event in skipped),
    ).model_dump(mode="json")


def mean_ledger(ledgers: Sequence[dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    """Return the ledger per kind of message: sums become means per rank and step, ratios stay."""
    ratios = ("compression_ratio", "density")
    result: dict[str, dict[str, Any]] = {}
    for kind, first in ledgers[0].items():
        accounts = [ledger[kind] for ledger in ledgers]
        result[kind] = {
            key: value if key in ratios else statistics.fmean(a[key] for a in accounts) / steps
            for key, value in first.items()
            if key != "uncompressed"
        }
        counts = [account["uncompressed"] for account in accounts]
        # a reason that a rank lacks counts as zero
        result[kind]["uncompressed"] = {
            reason: statistics.fmean(count.get(reason, 0) for count in counts) / steps
            for reason in sorted({reason for count in counts for reason in count})
        }
    return result


def _traffic(ledger: dict[str, dict[str, Any]], collective_ms: float | None) -> dict[str, Any]:
    """Return the traffic of a rank in a step, over all kinds of messages of `mean_ledger`."""
    total = {
        key: sum(kind[key] for kind in ledger.values())
        for key in ("bytes_raw", "bytes_wire", "index_bytes", "metadata_bytes", "extra_collectives")
    }
    ms = {
        f"{name}_ms": sum(kind[f"{name}_s"] for kind in ledger.values()) * 1e3
        for name in ("encode", "decode", "extra_collective")
    }
    raw, wire = total["bytes_raw"], total["bytes_wire"]
    return {
        **total,
        **ms,
        "compression_ratio": raw / wire if wire else 1.0,
        "collective_ms": collective_ms,
        "effective_bandwidth_raw": _rate(raw, collective_ms),
        "effective_bandwidth_wire": _rate(wire, collective_ms),
        "density": ledger["gradients"]["density"],
    }


def _most_memory(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the maximum over ranks of every figure; None where no rank has it."""
    return {
        key: max((r[key] for r in ranks if r[key] is not None), default=None) for key in ranks[0]
    }


def _rate(nbytes: float, milliseconds: float | None) -> float | None:
    """Return bytes per second."""
    return nbytes / milliseconds * 1e3 if nbytes and milliseconds else None


def _mean_if_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _root_of_squares(norms: Sequence[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return sum(norm**2 for norm in known) ** 0.5 if known else None


def _gradient_error(audits: Sequence[dict[str, float] | None]) -> dict[str, Any]:
    """Return relative error and cosine of the whole gradient, from the sums over all shards."""
    known = [audit for audit in audits if audit is not None]
    total = {key: sum(audit[key] for audit in known) for key in (known[0] if known else ())}
    if not total or not total["exact_squared"]:
        return {"grad_rel_error": None, "grad_cosine": None}
    norms = (total["exact_squared"] * total["reduced_squared"]) ** 0.5
    return {
        "grad_rel_error": (total["error_squared"] / total["exact_squared"]) ** 0.5,
        "grad_cosine": total["product"] / norms if norms else None,
    }
