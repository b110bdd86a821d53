"""Evidence made for tests: no run produced these figures.

Their sizes are like those of two ranks that train a model of a million parameters on a CPU.
"""

import math
import random
from typing import Any

from shardlab.choose.history import History, initial_history
from shardlab.choose.records import (
    Candidate,
    Comparison,
    Decision,
    Narrowing,
    Prediction,
    Role,
    Verdict,
)
from shardlab.choose.settings import Agent
from shardlab.results.result import Failure
from shardlab.results.table import StepRatio
from shardlab.results.train_result import TrainResult
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.train.settings import Train

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
HOST = {
    "cpu": "A processor made for tests",
    "cores": 2,
    "gpus": [],
    "memory_bytes": 8 * 2**30,
    "kernel": "6.1.0",
    "python": "3.11.9",
}
QUIET = {"foreign": 0.004, "stolen": 0.0}
BUSY = {"foreign": 0.31, "stolen": 0.02}
SPACE = Narrowing(
    strategies=9120,
    beyond_memory=300,
    spared=2400,
    known=12,
    unpredicted={"computation in bf16 was not timed": 3210},
    predicted=3210,
)


def make_record(run: str = BASELINE, seed: int = 0, **changes: Any) -> TrainResult:
    """One record; `changes` replace fields. Equal arguments make equal records."""
    step, ratio, ppl, error = FIGURES.get(run, FIGURES[BASELINE])
    strategy = parse_strategy(STRATEGIES.get(run, STRATEGIES[BASELINE]))
    chance = random.Random(f"{run} {seed}")
    step *= 1 + 0.02 * chance.uniform(-1, 1)
    ppl *= 1 + 0.01 * random.Random(seed).uniform(-1, 1) + 0.001 * chance.uniform(-1, 1)
    ledger = make_ledger(strategy.engine, ratio)
    raw, wire = (sum(kind[key] for kind in ledger.values()) for key in ("bytes_raw", "bytes_wire"))
    return TrainResult(
        **{
            **_setting(run, seed, strategy),
            "steps": STEPS,
            "diverged_at": None,
            "contention": QUIET,
            "step_ms_mean": step,
            "step_ms_p50": 0.98 * step,
            "step_ms_p90": 1.1 * step,
            "step_ms_p95": 1.2 * step,
            "tokens_per_s": 1024 / step * 1e3,
            "train_loss": math.log(ppl) - 0.1,
            "bytes_raw": raw,
            "bytes_wire": wire,
            "bytes_peak": wire,
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
            "memory_estimate_bytes": 31_552_000,
            "flops_per_token": 2.7e6,
            "product_flops_per_s": 5.1e10,
            "flops_share": 2.7e6 * 1024 / step * 1e3 / (2 * 5.1e10),
            "scaling_efficiency": 0.81,
            "skipped_steps": 0,
            "clipped_steps": 31,
            "invalid_steps": 0,
            **make_breakdown(1.3 * step, 0.31, 0.03),
            "val_loss": math.log(ppl),
            "val_ppl": ppl,
            "val_bits_per_byte": math.log2(ppl) / 3.3,
            "val_tokens": 48_211,
            "untrained_ppl": 2101.5,
            **changes,
        }
    )


def make_breakdown(step: float, exposed: float, hidden: float) -> dict[str, Any]:
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


def make_ledger(engine: str, ratio: float) -> dict[str, dict[str, Any]]:
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
            "encode_s": 0.0 if ratio == 1 else 1.9e-3,
            "decode_s": 0.0 if ratio == 1 else 1.2e-3,
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
        "link_emulation": "none",
        "bits_per_second": None,
        "delay_ms": 0.0,
        "ranks_per_node": 1,
        "codec": strategy.gradients.codec.name,
        "codec_config": strategy.gradients.codec.model_dump(),
        "weight_codec": "none",
        "error_feedback": strategy.gradients.error_feedback,
        "strategy": strategy.canonical().model_dump(mode="json"),
        "strategy_hash": strategy.hash(),
        "params_hash": "0123456789abcdef",
        "revision": "4e41bc4d1a2b",
        "torch": "2.13.0+cpu",
        "host": HOST,
        "kernels": "libshardlab_kernels_v4.so, csrc 0123456789ab",
    }


def trial_run(strategy: Strategy, seed: int, number: int = 1, **changes: Any) -> TrainResult:
    """What a round has trained: the figures of fsdp2."""
    return make_record("fsdp2", seed).model_copy(update={**in_round(strategy, number), **changes})


def in_round(strategy: Strategy, number: int = 1, kind: str = "trial") -> dict[str, Any]:
    """Fields of the header of a result of a round."""
    return {
        "kind": kind,
        "timing": f"round-{number}",
        "run": strategy.hash(),
        "strategy": strategy.canonical().model_dump(mode="json"),
        "strategy_hash": strategy.hash(),
    }


def make_failure(
    strategy: Strategy, outcome: str, detail: str = "by test", **changes: Any
) -> Failure:
    """How a strategy failed in the training of round 1, or as `changes` of the header say."""
    facts = {**make_record("fsdp2").header(), **in_round(strategy), **changes}
    return Failure.model_validate({**facts, "outcome": outcome, "detail": detail})


def make_records(runs: list[str] | None = None, seeds: int = 3) -> list[TrainResult]:
    """Runs x seeds in the order of the report."""
    return [make_record(run, seed) for run in runs or STRATEGIES for seed in range(seeds)]


def make_history(records: list[TrainResult], reason: str = "ddp waits less at the end") -> History:
    """A search of two rounds: a race of two that nothing replaces the start after, an abstention.

    Args:
        reason: of the judge.
    """
    agent = Agent().model_copy(update={"start": records[0].run})  # any text is a name here
    first = initial_history(records, [], agent, Train(world_size=records[0].world_size))
    offer = make_candidate(engine="fsdp2", reshard_after_forward=False, gradients={"codec": "bf16"})
    other = make_candidate(engine="manual")
    place = {"link": "loopback", "world_size": records[0].world_size}
    step = StepRatio(source="round 1", **place, ratio=0.98, low=0.9, high=1.07, repetitions=120)
    answers = ["results/answers/0123456789abcdef.json"]
    lost = {"outcome": "timeout", "step": None}
    rounds = [
        Decision(
            round=1,
            search="",
            **place,
            verdict=Verdict(choice=offer.id, reason=reason, judge="rules", prompts=answers),
            space=SPACE,
            candidates=[offer, other],
            stopped="all of 120 repetitions",
            seconds=41.5,
            decision="reject",
            reason="no gain in step time is shown",
            held=first.incumbent,
            compared=[
                _compared(offer, ["judge", "forecast"], "no gain in step time is shown", step=step),
                _compared(other, ["random"], "it ended with outcome timeout: 300 s", **lost),
            ],
            warnings=["race of round 1: others used 33 % of its CPUs during it"],
        ),
        Decision(
            round=2,
            search="",
            **place,
            verdict=Verdict(choice=None, reason="no candidate is left", judge="rules"),
            space=None,
            candidates=[],
            stopped="",
            seconds=0.0,
            decision="none",
            reason="nothing was raced: no candidate is left",
            held=first.incumbent,
        ),
    ]
    return first.model_copy(update={"rounds": rounds})


def make_candidate(**document: Any) -> Candidate:
    """Candidate with one prediction for all."""
    return candidate_of(parse_strategy(document))


def candidate_of(strategy: Strategy) -> Candidate:
    """Candidate of a strategy, with the same prediction as all."""
    return Candidate(
        hash=strategy.hash(),
        strategy=strategy.canonical(),
        label=strategy.label(),
        why="the shortest predicted step of its engine and codecs",
        prediction=Prediction(
            step_ms=40.0,
            low_ms=36.5,
            high_ms=43.5,
            memory_bytes=812_345_344,
            perplexity_ratio=1.002,
            note="its codecs: run fsdp2-bf16",
        ),
    )


def _compared(each: Candidate, roles: list[Role], objection: str, **changes: Any) -> Comparison:
    facts = {"outcome": "ok", "predicted_ms": each.prediction.step_ms, "objections": [objection]}
    key = each.strategy.hash()
    return Comparison(hash=key, label=each.label, roles=roles, **{**facts, **changes})


def make_losses(run: str, seed: int) -> dict[int, float]:
    """A falling training loss by step."""
    noise = random.Random(seed)
    worse = math.log(FIGURES.get(run, FIGURES[BASELINE])[2] / 182) * 2
    return {
        step: 5.0 + (2.6 + worse) * math.exp(-step / 15) + 0.06 * noise.gauss(0, 1)
        for step in range(STEPS)
    }
