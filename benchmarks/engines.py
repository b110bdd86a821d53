"""Comparison of engines: losses, step time, memory, collectives and bytes against theory.

    python -m benchmarks.engines [STRATEGY ...] [--world-size W ...] [--preset NAME] [--steps S]
                                 [--delay MS ...] [--repetitions R] [--work FOLDER]

Every run has processes of its own, so that its peak memory is its own; runs are interleaved, and
the fastest of each counts. All see the same batches of random tokens from one seed. With a delay
every collective ends that much later, as on a link of that latency: a sleep, so ratios hold on a
busy machine too.
"""

import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import WORK, arguments, choose, on_ranks, print_table, write_results
from shardlab.comm.emulated_link import LinkThrottle
from shardlab.comm.object_collectives import device_of
from shardlab.config.model_and_data import Model
from shardlab.config.strategy import Strategy, parse_strategy
from shardlab.core.document import validate
from shardlab.core.progress import say
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import PRESETS, build_model, transformer_blocks
from shardlab.report.tables import figure
from shardlab.train.utilization import peak_memory

EXCHANGE = {"route": "exchange"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1-exchange": {"engine": "fsdp1", "gradients": EXCHANGE},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-exchange": {"engine": "fsdp2", "gradients": EXCHANGE},
    "fsdp2-ahead": {"engine": "fsdp2", "gradients": EXCHANGE, "prefetch": 1},
    # what forward ends with backward begins with
    "fsdp2-best": {
        "engine": "fsdp2",
        "gradients": EXCHANGE,
        "prefetch": 1,
        "overrides": [{"layers": "LAST", "reshard_after_forward": False}],
    },
    "fsdp2-best-of-two": {
        "engine": "fsdp2",
        "wrap_size": 2,
        "gradients": EXCHANGE,
        "prefetch": 1,
        "overrides": [{"layers": "LAST", "reshard_after_forward": False}],
    },
    "fsdp2-kept": {"engine": "fsdp2", "gradients": EXCHANGE, "reshard_after_forward": False},
    "fsdp2-hybrid": {"engine": "fsdp2", "sharding": "hybrid_shard", "replicas": 2},
    "manual": {"engine": "manual"},
    "manual-of-two": {"engine": "manual", "wrap_size": 2},
    "manual-kept": {"engine": "manual", "reshard_after_forward": False},
    "manual-hybrid": {"engine": "manual", "sharding": "hybrid_shard", "replicas": 2},
    "slide": {"engine": "slide"},
    "slide-reduced": {"engine": "slide", "param_transfer": "shard", "grad_sync": "gpu_reduce"},
}
COMPRESSED: dict[str, dict[str, Any]] = {
    f"{engine}-{name}": {"engine": engine, "gradients": {"codec": codec, "error_feedback": True}}
    for engine in ("ddp", "fsdp2", "manual")
    for name, codec in (("int8", "int8:group=128"), ("topk", "topk:density=0.01"))
}
"""runs that are measured where they are named"""
_DOCUMENTS = {**STRATEGIES, **COMPRESSED}
_VOCABULARY, _UNTIMED = 2048, 3


class Case(NamedTuple):
    """Parameters of one run."""

    strategy: str
    world_size: int
    preset: str
    steps: int
    delay_ms: float = 0.0
    samples: int = 8
    """of all ranks, in a step"""
    length: int = 64


def main() -> None:
    args = arguments(
        __doc__,
        ("strategies", "default: all"),
        world_size=[1, 2, 4],
        preset="10m",
        steps=50,
        delay=([0.0], "ms per collective"),
        repetitions=1,
        work=WORK,
    )
    chosen = choose(args.strategies, [*STRATEGIES, *COMPRESSED], STRATEGIES)
    results: dict[str, Any] = {}
    for world_size in args.world_size:
        for delay in args.delay:
            cases = [
                Case(name, world_size, args.preset, args.steps, delay)
                for name in chosen
                if world_size % 4 == 0 or "replicas" not in _DOCUMENTS[name]
            ]
            measured = _measured(cases, args.repetitions)
            results[f"W={world_size}, {delay:g} ms"] = measured
            write_results(args.work / "engines.json", **results)
            _print(world_size, delay, measured)


def _measured(cases: list[Case], repetitions: int) -> dict[str, dict[str, Any]]:
    """Return, by strategy, rank 0's figures of the fastest run, with losses averaged over ranks."""
    best: dict[str, dict[str, Any]] = {}
    for _ in range(repetitions):
        for case in cases:
            ranks = on_ranks(case.world_size, partial(measure, case))
            found = ranks[0]
            found["losses"] = [
                sum(step) / len(ranks) for step in zip(*(r["losses"] for r in ranks), strict=True)
            ]
            say(f"benchmarks: {case.strategy}, W={case.world_size}: {found['step_ms']:.0f} ms")
            known = best.get(case.strategy)
            if known is None or found["step_ms"] < known["step_ms"]:
                best[case.strategy] = found
    return best


def measure(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the figures of a run, on each of its ranks."""
    device = device_of(group)
    preset = validate(Model, {"preset": case.preset}, "--preset")
    model = build_model(preset, _VOCABULARY, case.length, 0, seed=1).whole()
    sizes = [sum(p.numel() for p in block.parameters()) for block in transformer_blocks(model)]
    whole = sum(p.numel() for p in model.parameters())
    strategy = _strategy(case)
    optimization = Optimization(weight_decay=0.1, clip=1.0)
    throttle = LinkThrottle(case.delay_ms) if case.delay_ms else None
    engine = build_engine(model, strategy, optimization, group, device=device, throttle=throttle)
    losses, times = [], []
    for step in range(case.steps):
        if step == min(_UNTIMED, case.steps - 1):
            engine.ledger.reset()
        start = time.perf_counter()
        losses.append(engine.step([_batch(case, step, group)], 1e-3).loss)
        times.append(time.perf_counter() - start)
    timed = case.steps - min(_UNTIMED, case.steps - 1)
    ledger = engine.ledger.summary()
    counts = {
        f"{kind}_{key}": ledger[kind][key] / timed
        for kind in ("gradients", "weights")
        for key in ("collectives", "bytes_raw", "bytes_wire")
    }
    return {
        "losses": losses,
        "step_ms": 1e3 * statistics.median(times[-timed:]),
        "memory_mb": peak_memory(device) / 1e6,
        "theory": _theory(case, strategy.canonical(), sizes, whole),
        **counts,
    }


def _batch(case: Case, step: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the samples of a step, which are the same at every world size."""
    generator = torch.Generator().manual_seed(step)
    samples = torch.randint(_VOCABULARY, (case.samples, case.length + 1), generator=generator)
    return samples.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def _strategy(case: Case) -> Strategy:
    layers = PRESETS[case.preset].layers
    document = dict(_DOCUMENTS[case.strategy])
    if "overrides" in document:
        # of the last unit
        first = (layers - 1) // document.get("wrap_size", 1) * document.get("wrap_size", 1)
        last = f"{first}-{layers - 1}"
        document["overrides"] = [{**each, "layers": last} for each in document["overrides"]]
    return parse_strategy(document)


def _theory(case: Case, strategy: Strategy, blocks: list[int], whole: int) -> dict[str, float]:
    """Return collectives and bytes that one rank has to send in a step, in float32."""
    if case.world_size == 1:
        return {"weights": 0, "gradients": 0, "bytes": 0}
    replicas = strategy.replicas or 1
    shards = case.world_size // replicas
    if strategy.engine == "ddp":
        return {"weights": 0, "gradients": 1, "bytes": 2 * _share(shards) * whole}
    each = strategy.wrap_size or 1
    sizes = [sum(blocks[first : first + each]) for first in range(0, len(blocks), each)]
    # forward gathers all, backward again what was freed
    again = sizes if strategy.reshard_after_forward else []
    if strategy.engine == "manual" or strategy.overrides:
        again = again[:-1]  # the last unit stays
    units = 1 + len(sizes)
    # exchanged, an average over copies is a reduce-scatter and an all-gather
    between = 0 if replicas == 1 else 2 if strategy.gradients.route == "exchange" else 1
    return {
        "weights": units + len(again),
        "gradients": units * (1 + between),
        "bytes": _share(shards) * (2 * whole + sum(again)) + 2 * _share(replicas) * whole / shards,
    }


def _share(ranks: int) -> float:
    """Return the bytes per element that one rank sends in a reduce-scatter or all-gather."""
    return 4 * (ranks - 1) / ranks


def _print(world_size: int, delay: float, measured: dict[str, dict[str, Any]]) -> None:
    headings = [
        "strategy",
        "step, ms",
        "against the first",
        "last loss",
        "largest difference of losses",
        "peak memory, MB",
        "gathers (theory)",
        "reductions (theory)",
        "MB raw (theory)",
        "MB wire",
    ]
    first = next(iter(measured.values()))
    rows = [[name, *_cells(found, first)] for name, found in measured.items()]
    print_table(f"W={world_size}, {delay:g} ms per collective", headings, rows)


def _cells(found: dict[str, Any], first: dict[str, Any]) -> list[str]:
    theory = found["theory"]
    differences = [abs(a / b - 1) for a, b in zip(found["losses"], first["losses"], strict=True)]
    raw, wire = (
        sum(found[f"{kind}_bytes_{what}"] for kind in ("gradients", "weights"))
        for what in ("raw", "wire")
    )
    return [
        figure(found["step_ms"]),
        figure(found["step_ms"] / first["step_ms"]),
        f"{found['losses'][-1]:.4f}",
        f"{max(differences):.1e}",
        figure(found["memory_mb"]),
        f"{figure(found['weights_collectives'])} ({theory['weights']:g})",
        f"{figure(found['gradients_collectives'])} ({theory['gradients']:g})",
        f"{figure(raw / 1e6)} ({figure(theory['bytes'] / 1e6)})",
        figure(wire / 1e6),
    ]


if __name__ == "__main__":
    main()
