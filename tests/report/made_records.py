"""Evidence made for tests: no run produced these figures.

Their sizes are like those of two ranks that train a model of a million parameters on a CPU.
"""

import math
import random
from typing import Any

from shardlab.agent.history import History, initial_history
from shardlab.agent.rounds import Candidate, Refused, Round, TrialSummary, Verdict
from shardlab.core.params import Quality
from shardlab.core.records import Record
from shardlab.core.strategy import Strategy, parse_strategy
from shardlab.core.timings import NO_COMMUNICATION, TimedRun
from shardlab.forecast.breakeven import BreakEven
from shardlab.forecast.check import Check, summarize
from shardlab.forecast.extrapolation import Point
from shardlab.forecast.results import Foretold
from shardlab.report.write import Evidence

BASELINE = "fsdp2"
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "ddp-int8": {"engine": "ddp", "gradients": {"codec": "int8:group=128"}},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-exchange": {"engine": "fsdp2", "gradients": {"codec": "none", "route": "exchange"}},
    "fsdp2-bf16": {"engine": "fsdp2", "gradients": {"codec": "bf16"}},
    "fsdp2-int8": {"engine": "fsdp2", "gradients": {"codec": "int8:group=128"}},
    "fsdp2-int4": {
        "engine": "fsdp2",
        "gradients": {"codec": "int4:group=128", "error_feedback": True},
    },
    "fsdp2-topk": {
        "engine": "fsdp2",
        "gradients": {"codec": "topk:density=0.05", "error_feedback": True},
    },
}
# step ms, compression ratio of the gradients, perplexity, relative gradient error
FIGURES = {
    "ddp": (41.0, 1.0, 182.0, 0.0),
    "ddp-int8": (46.5, 3.88, 182.4, 0.0061),
    "fsdp2": (48.3, 1.0, 182.1, 0.0),
    "fsdp2-exchange": (49.0, 1.0, 182.1, 2.1e-8),
    "fsdp2-bf16": (50.2, 2.0, 182.1, 0.0017),
    "fsdp2-int8": (51.7, 3.87, 182.6, 0.0062),
    "fsdp2-int4": (51.2, 7.5, 183.0, 0.11),
    "fsdp2-topk": (55.0, 9.1, 201.5, 0.72),
}
STEPS = 60
_HOST = {
    "cpu": "A processor made for tests",
    "cores": 2,
    "memory_bytes": 8 * 2**30,
    "kernel": "6.1.0",
    "python": "3.11.9",
}


def make_record(run: str = BASELINE, seed: int = 0, **changes: Any) -> Record:
    """One record; `changes` replace fields. Equal arguments make equal records."""
    step, ratio, ppl, error = FIGURES.get(run, FIGURES[BASELINE])
    strategy = parse_strategy(STRATEGIES.get(run, STRATEGIES[BASELINE]))
    chance = random.Random(f"{run} {seed}")
    step *= 1 + 0.02 * chance.uniform(-1, 1)
    ppl *= 1 + 0.01 * random.Random(seed).uniform(-1, 1) + 0.001 * chance.uniform(-1, 1)
    ledger = _ledger(strategy.engine, ratio)
    raw, wire = (sum(kind[key] for kind in ledger.values()) for key in ("bytes_raw", "bytes_wire"))
    return Record(
        **{
            **_setting(run, seed, strategy),
            "steps": STEPS,
            "step_ms_mean": step,
            "step_ms_p50": 0.98 * step,
            "step_ms_p90": 1.1 * step,
            "step_ms_p95": 1.2 * step,
            "tokens_per_s": 1024 / step * 1e3,
            "train_loss": math.log(ppl) - 0.1,
            "bytes_raw": raw,
            "bytes_wire": wire,
            "compression_ratio": raw / wire,
            "collective_ms": 0.3 * step,
            "effective_bandwidth_raw": raw / (0.3 * step) * 1e3,
            "effective_bandwidth_wire": wire / (0.3 * step) * 1e3,
            "ledger": ledger,
            "encode_ms": 0.0 if ratio == 1 else 1.9,
            "decode_ms": 0.0 if ratio == 1 else 1.2,
            "index_bytes": 1.1e5 if "topk" in run else 0.0,
            "metadata_bytes": 0.0 if ratio == 1 else 4.1e4,
            "density": 0.05 if "topk" in run else None,
            "extra_collectives": 0.0,
            "extra_collective_ms": 0.0,
            "residual_norm": 1.3 if "topk" in run else None,
            "grad_rel_error": error,
            "grad_cosine": math.sqrt(max(0.0, 1 - error**2)),
            "memory_peak_bytes": 812_345_344,
            "memory_growth_bytes": 41_200_000,
            "memory_reserved_bytes": None,
            "memory_estimate_bytes": None if strategy.engine == "manual" else 31_855_800,
            "memory_closed_form_bytes": 31_552_000,
            "flops_per_token": 2.7e6,
            "product_flops_per_s": 5.1e10,
            "flops_share": 2.7e6 * 1024 / step * 1e3 / (2 * 5.1e10),
            "scaling_efficiency": 0.81,
            "steps_to_quality": {"6.4": 31.5, "1": None},
            "time_to_quality_s": {"6.4": 31.5 * step / 1e3, "1": None},
            "quality_at_time": {"3": 6.2},
            "skipped_steps": 0,
            "clipped_steps": 31,
            "invalid_steps": 0,
            **_breakdown(1.3 * step, 0.31, 0.03),
            "val_loss": math.log(ppl),
            "val_ppl": ppl,
            "val_bits_per_byte": math.log2(ppl) / 3.3,
            "val_tokens": 48_211,
            "untrained_ppl": 2101.5,
            **changes,
        }
    )


def _breakdown(step: float, exposed: float, hidden: float) -> dict[str, Any]:
    """Of a traced step in which communication takes two shares, one of them beside compute."""
    comm = (exposed + hidden) * step
    return {
        "profiled_step_ms": step,
        "compute_ms": (0.96 - exposed) * step,
        "comm_ms_per_step": comm,
        "comm_share": exposed + hidden,
        "comm_ms_by_op": {"all_gather": 0.4 * comm, "reduce_scatter": 0.6 * comm},
        "comm_ms_by_unit": {"h.0": 0.5 * comm, "h.1": 0.4 * comm, "other": 0.1 * comm},
        "comm_skew_ms": 0.25 * comm,
        "comm_transfer_ms": 0.75 * comm,
        "exposed_comm_ms": exposed * step,
        "overlap": hidden / (exposed + hidden),
        "copy_ms": 0.0,
        "exposed_copy_ms": 0.0,
        "idle_ms": 0.04 * step,
        "forward_ms": 0.3 * step,
        "forward_compute_ms": 0.25 * step,
        "forward_comm_ms": 0.05 * step,
        "backward_ms": 0.6 * step,
        "backward_compute_ms": 0.4 * step,
        "backward_comm_ms": 0.18 * step,
        "backward_comm_share": 0.3,
        "update_ms": 0.1 * step,
        "update_compute_ms": 0.08 * step,
        "update_comm_ms": 0.01 * step,
    }


def _ledger(engine: str, ratio: float) -> dict[str, dict[str, Any]]:
    """Gradients are compressed; weights, which only fsdp2 moves, are not."""
    gradients = 5.2e6 if engine == "ddp" else 2.6e6
    weights = 0.0 if engine == "ddp" else 5.2e6
    small = {"fewer than 1024 elements": 2.0} if ratio != 1 else {}
    return {
        kind: {
            "bytes_raw": raw,
            "bytes_wire": raw / ratio,
            "bytes_between_nodes": 0.0,
            "collectives": 5.0 if raw else 0.0,
            "uncompressed": reasons,
        }
        for kind, raw, ratio, reasons in (
            ("gradients", gradients, ratio, small),
            ("weights", weights, 1.0, {}),
        )
    }


def _setting(run: str, seed: int, strategy: Strategy) -> dict[str, Any]:
    return {
        "run": run,
        "seed": seed,
        "engine": strategy.engine,
        "world_size": 2,
        "model": "tiny",
        "parameters": 1_312_000,
        "dataset": "wikipedia",
        "sequence_length": 64,
        "batch_size": 8,
        "accumulation": 1,
        "link": "loopback",
        "codec": strategy.gradients.codec.name,
        "codec_config": strategy.gradients.codec.model_dump(),
        "weight_codec": "none",
        "error_feedback": strategy.gradients.error_feedback,
        "strategy": strategy.normal().model_dump(mode="json"),
        "strategy_hash": strategy.hash(),
        "params_hash": "0123456789abcdef",
        "revision": "4e41bc4d1a2b",
        "torch": "2.13.0+cpu",
        "host": _HOST,
    }


def make_records(runs: list[str] | None = None, seeds: int = 3) -> list[Record]:
    """Runs x seeds in the order of the report."""
    return [make_record(run, seed) for run in runs or STRATEGIES for seed in range(seeds)]


def make_history(records: list[Record], reason: str = "ddp waits less at the end") -> History:
    """A search of two rounds: one rejected strategy, one abstention."""
    strategy = parse_strategy(
        {"engine": "fsdp2", "reshard_after_forward": False, "gradients": {"codec": "bf16"}}
    )
    offer = Candidate(
        id=strategy.hash()[:6],
        strategy=strategy.normal(),
        brief=strategy.brief(),
        why="one change: keep the gathered parameters for backward",
    )
    refused = Refused(brief="fsdp2, none", reason="measured before: run fsdp2")
    tried = TrialSummary(
        outcome="timeout",
        detail="after 300 s",
        hash=strategy.hash(),
        brief=strategy.brief(),
        measurements=[],
    )
    nothing = TrialSummary(outcome="none", detail="", hash=None, brief=None, measurements=[])
    rounds = [
        Round(
            round=1,
            verdict=Verdict(choice=offer.id, reason=reason, judge="rules"),
            candidates=[offer],
            refused=[refused],
            trial=tried,
            decision="reject",
            reason="the trial gave no figures",
            comparison=None,
        ),
        Round(
            round=2,
            verdict=Verdict(choice=None, reason="no candidate is left", judge="rules"),
            candidates=[],
            refused=[refused],
            trial=nothing,
            decision="none",
            reason="nothing was tried",
            comparison=None,
        ),
    ]
    history = initial_history(records, records[0].run)
    return history.model_copy(update={"rounds": rounds})


def make_losses(run: str, seed: int) -> dict[int, float]:
    """A falling training loss by step."""
    noise = random.Random(seed)
    worse = math.log(FIGURES.get(run, FIGURES[BASELINE])[2] / 182) * 2
    return {
        step: 5.0 + (2.6 + worse) * math.exp(-step / 15) + 0.06 * noise.gauss(0, 1)
        for step in range(STEPS)
    }


# of a model of a million parameters: rates on which all traffic takes longer than anything else
RATES: dict[str, int | None] = {"two-ranks": None, "slow": 10**8, "fast": 10**9}


def make_timed(
    timing: str = "slow",
    run: str = BASELINE,
    world_size: int = 2,
    rounds: int = 6,
    **changes: Any,
) -> TimedRun:
    """One run of a timing; `changes` replace fields. A step is compute plus bytes over rate."""
    bound = run == NO_COMMUNICATION
    strategy = None if bound else parse_strategy(STRATEGIES[run])
    ledger = _ledger(strategy.engine if strategy else "ddp", FIGURES[run][1] if strategy else 1.0)
    raw, wire = (
        0.0 if bound or world_size == 1 else sum(kind[key] for kind in ledger.values())
        for key in ("bytes_raw", "bytes_wire")
    )
    rate = RATES.get(timing)
    sending = wire * 8e3 / (rate or 10**10)
    compute = FIGURES[run][0] / 2 if strategy else 18.0
    chance, drift = random.Random(f"{timing} {run}"), random.Random(timing)
    step_ms = [
        (compute + sending) * (1 + 0.2 * drift.random()) * (1 + 0.02 * chance.uniform(-1, 1))
        for _ in range(rounds)
    ]
    step = sum(step_ms) / rounds
    facts: dict[str, Any] = {
        "timing": timing,
        "run": run,
        "strategy": strategy and strategy.normal().model_dump(mode="json"),
        "strategy_hash": strategy and strategy.hash(),
        "model": "tiny",
        "parameters": 1_312_000,
        "units": [{"name": "root", "elements": 1_312_000}],
        "world_size": world_size,
        "threads": 1,
        "batch_size": 8,
        "accumulation": 1,
        "sequence_length": 64,
        "link": "loopback" if rate is None else f"{rate // 10**6}mbit",
        "link_emulation": "none" if rate is None else "namespaces",
        "bits_per_second": rate,
        "delay_ms": 0.0,
        "step_ms": step_ms,
        "bytes_raw": raw,
        "bytes_wire": wire,
        "interface_bytes": None if rate is None else 1.01 * wire + 66 * 200,
        "interface_frames": None if rate is None else 200.0,
        "ledger": ledger,
        "breakdown": _breakdown(step, sending / (compute + sending), 0.02),
        "revision": "4e41bc4d1a2b",
        "torch": "2.13.0+cpu",
        "host": _HOST,
    }
    return TimedRun(**{**facts, **changes})


def make_timings(runs: list[str] | None = None, **changes: Any) -> list[TimedRun]:
    """One rank, two without a link, two on a slow and on a fast one."""
    named = [*(runs or STRATEGIES), NO_COMMUNICATION]
    alone = [make_timed("one-rank", run, world_size=1, **changes) for run in named]
    return alone + [make_timed(timing, run, **changes) for timing in RATES for run in named]


def make_foretold(runs: list[str] | None = None, **changes: Any) -> Foretold:
    """A forecast of made timings; `changes` replace fields. Errors alternate around nothing."""
    named = [*(runs or STRATEGIES)]
    checks = [
        Check(
            timing="fast",
            run=run,
            world_size=2,
            link="1000mbit",
            held_out=run != BASELINE,
            predicted_ms=40.0 + number,
            low_ms=39.0 + number,
            high_ms=41.0 + number,
            measured_ms=40.0,
            error=number / 40,
            error_of_communication=-number / 50,
        )
        for number, run in enumerate(named)
    ]
    points = [
        Point(
            run=run,
            link=link,
            ranks=n,
            step_ms=20.0 + n,
            low_ms=19.0 + n,
            high_ms=21.0 + n,
            compute_ms=20.0,
        )
        for run in named
        for link in ("ethernet-10g", "dgx-h100")
        for n in (8, 1024)
    ]
    facts: dict[str, Any] = {
        "learnt_from": ["two-ranks/fsdp2"],
        "summary": summarize(checks),
        "checks": checks,
        "left_out": {"fsdp2-sketch": "the model does not know codec sketch"},
        "operations": [],
        "engines": [],
        "points": points,
        "links": {"ethernet-10g": "made for tests", "dgx-h100": "made for tests"},
        "break_even": [
            BreakEven(
                run="fsdp2-int8",
                codec="int8:group=128",
                ratio=0.26,
                exposed=2.1e9,
                step=1.4e9,
                always=False,
            ),
            BreakEven(
                run="fsdp2-int4",
                codec="int4:group=128",
                ratio=0.13,
                exposed=1.9e9,
                step=None,
                always=True,
            ),
        ],
        "assumptions": ["Every rank computes as here."],
    }
    return Foretold(**{**facts, **changes})


def make_evidence(records: list[Record], baseline: str = BASELINE, **changes: Any) -> Evidence:
    """Evidence around given records; `changes` replace its fields."""
    losses: dict[str, dict[int, dict[int, float]]] = {}
    for record in records:
        losses.setdefault(record.run, {})[record.seed] = make_losses(record.run, record.seed)
    facts: dict[str, Any] = {
        "records": records,
        "baseline": baseline,
        "losses": losses,
        "history": make_history(records),
        "source": {
            "name": "wikipedia",
            "licence": "CC BY-SA 4.0",
            "attribution": "Text by the contributors of English Wikipedia; markup removed.",
            "url": "https://en.wikipedia.org/",
            "documents": 10_084,
            "bytes": 7_712_345,
            "bad_records": {"count": 2, "reasons": {"no text": 2}},
        },
        "statistics": {
            "vocabulary": 2048,
            "train": {"documents": 9_880, "tokens": 2_312_004, "bytes_per_token": 3.2711},
            "length": {"mean": 234.1, "p50": 142.0, "p90": 399.0, "p99": 911.0, "max": 40_112},
            "pad_ratio": 0.0,
            "entropy_bits": 9.1342,
        },
        "timed": make_timings(),
        "quality": Quality(train_loss=(7.0, 5.5), time_s=(1.0, 4.0)),
        "foretold": make_foretold(),
        **changes,
    }
    return Evidence(**facts)
