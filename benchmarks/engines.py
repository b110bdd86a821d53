"""Engines: losses, step time, memory, collectives and bytes.

    python -m benchmarks.engines [STRATEGY ...] [--world-size W ...] [--rate 100mbit ...] ...

Every run has processes of its own, so that its peak memory is its own; runs take turns, and the
fastest of each counts. All see the same batches of random tokens from one seed. With rates the
table is repeated on emulated links.
"""

import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import arguments, on_ranks, publish, text_table
from shardlab.comm.object_collectives import device_of
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.numbers import figure
from shardlab.core.progress import say
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.report.tables import Table
from shardlab.strategy.document import parse_strategy
from shardlab.train.utilization import peak_memory

_EXCHANGE = {"route": "exchange"}
_HYBRID = {"sharding": "hybrid_shard", "replicas": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-exchange": {"engine": "fsdp2", "gradients": _EXCHANGE},
    "fsdp2-ahead": {"engine": "fsdp2", "gradients": _EXCHANGE, "prefetch": 1},
    "fsdp2-hybrid": {"engine": "fsdp2", **_HYBRID},
    "manual": {"engine": "manual"},
    "manual-hybrid": {"engine": "manual", **_HYBRID},
    "slide": {"engine": "slide"},
    "slide-shards": {"engine": "slide", "param_transfer": "shard", "grad_sync": "gpu_reduce"},
}
COMPRESSED: dict[str, dict[str, Any]] = {
    f"{engine}-{name}": {"engine": engine, "gradients": {"codec": codec, "error_feedback": True}}
    for engine in ("ddp", "fsdp2", "manual")
    for name, codec in (("int8", "int8:group=128"), ("topk", "topk:density=0.01"))
}
"""runs that are measured where they are named"""
_DOCUMENTS = {**STRATEGIES, **COMPRESSED}
_VOCABULARY, _UNTIMED = 2048, 3
_HEADINGS = [
    *("strategy", "step, ms", "compared with the first", "last loss"),
    *("largest difference of losses", "peak memory, MB", "gathers", "reductions", "MB raw"),
    "MB wire",
]


class EngineCase(NamedTuple):
    """Parameters of one run."""

    strategy: str
    preset: str
    steps: int = 4
    samples: int = 8
    length: int = 64


def main() -> None:
    args = arguments(
        __doc__,
        ("strategies", "default: all without a codec"),
        world_size=[1, 2, 4],
        preset="4x176",
        steps=50,
        samples=(8, "of all ranks, in a step"),
        length=64,
        rate=([], "such as 100mbit 1gbit"),
        repetitions=1,
    )
    if unknown := {*args.strategies} - {*_DOCUMENTS}:
        raise UserError(f"{', '.join(sorted(unknown))}: not one of {', '.join(_DOCUMENTS)}")
    names = args.strategies or [*STRATEGIES]
    tables = []
    for world_size in args.world_size:
        cases = [
            EngineCase(name, args.preset, args.steps, args.samples, args.length)
            for name in names
            if world_size % 4 == 0 or "replicas" not in _DOCUMENTS[name]
        ]
        rates = [None, *args.rate] if world_size > 1 else [None]
        tables += [table(cases, world_size, rate, args.repetitions) for rate in rates]
    publish(__doc__, args.out / "engines.md", *tables)


def table(cases: list[EngineCase], world_size: int, rate: str | None, repetitions: int) -> Table:
    """Measure all cases in turns and return the table of the fastest runs."""
    best: dict[str, dict[str, Any]] = {}
    for case in cases * repetitions:
        ranks = on_ranks(world_size, partial(measure, case), rate=rate)
        losses = [
            statistics.fmean(step) for step in zip(*(r["losses"] for r in ranks), strict=True)
        ]
        run = {**ranks[0], "losses": losses}
        say(f"benchmarks: {case.strategy}, W={world_size}: {run['step_ms']:.0f} ms")
        best[case.strategy] = min(run, best.get(case.strategy, run), key=lambda r: r["step_ms"])
    first = next(iter(best.values()))
    rows = [[name, *_cells(run, first)] for name, run in best.items()]
    return text_table(f"W={world_size}, {rate or 'loopback'}", _HEADINGS, rows)


def _cells(run: dict[str, Any], first: dict[str, Any]) -> list[str]:
    differences = [abs(a / b - 1) for a, b in zip(run["losses"], first["losses"], strict=True)]
    return [
        figure(run["step_ms"]),
        figure(run["step_ms"] / first["step_ms"]),
        f"{run['losses'][-1]:.4f}",
        f"{max(differences):.1e}",
        figure(run["memory_mb"]),
        *(figure(run[name]) for name in ("gathers", "reductions", "raw_mb", "wire_mb")),
    ]


def measure(case: EngineCase, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the figures of a run, counts and bytes by step, on each of its ranks."""
    engine = engine_of(case, group)
    losses, seconds = [], []
    untimed = min(_UNTIMED, case.steps - 1)
    for step in range(case.steps):
        if step == untimed:
            engine.ledger.reset()
        start = time.perf_counter()
        losses.append(engine.step([batch_of(case, step, group)], 1e-3).loss)
        seconds.append(time.perf_counter() - start)
    ledger, timed = engine.ledger.summary(), case.steps - untimed
    raw, wire = (
        sum(ledger[kind][name] for kind in ("gradients", "weights")) / timed / 1e6
        for name in ("bytes_raw", "bytes_wire")
    )
    return {
        "losses": losses,
        "step_ms": 1e3 * statistics.median(seconds[untimed:]),
        "memory_mb": peak_memory(device_of(group)) / 1e6,
        "gathers": ledger["weights"]["collectives"] / timed,
        "reductions": ledger["gradients"]["collectives"] / timed,
        "raw_mb": raw,
        "wire_mb": wire,
    }


def engine_of(case: EngineCase, group: dist.ProcessGroup) -> Engine:
    """Return the engine of a model with random weights."""
    preset = validate(Model, {"preset": case.preset}, "--preset")
    model = build_model(preset, _VOCABULARY, case.length, 0, seed=1).whole()
    strategy, optimization = (
        parse_strategy(_DOCUMENTS[case.strategy]),
        Optimization(),
    )
    return build_engine(model, strategy, optimization, group, device=device_of(group))


def batch_of(case: EngineCase, step: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the samples of a step, which are the same at every world size."""
    generator = torch.Generator().manual_seed(step)
    samples = torch.randint(_VOCABULARY, (case.samples, case.length + 1), generator=generator)
    return samples.chunk(dist.get_world_size(group))[dist.get_rank(group)]


if __name__ == "__main__":
    main()
