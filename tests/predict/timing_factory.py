"""Timings and calibrations of a known machine, whose parameters a fit must recover."""

from typing import Any

from shardlab.core.link import bits_per_second
from shardlab.predict.costs import MeasuredCosts
from shardlab.predict.machine import CodecLines, Line, Machine
from shardlab.predict.model import PerformanceModel, case_of, workload_of
from shardlab.predict.step import Compute, section_seconds
from shardlab.results.calibration_record import (
    Calibration,
    CodecCost,
    MemoryCost,
    MemoryOperation,
    Operation,
    Transfer,
    wire_bytes,
)
from shardlab.results.result import UnitSize
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from tests.record_factory import HOST, QUIET, make_breakdown, make_ledger
from tests.timed_run_factory import timed_facts

INT8 = "int8:group=128"
STRATEGIES: dict[str, dict[str, Any]] = {
    **{engine: {"engine": engine} for engine in ENGINES},
    "fsdp2-exchange": {"engine": "fsdp2", "gradients": {"codec": "none", "route": "exchange"}},
    "fsdp2-ahead": {
        "engine": "fsdp2",
        "prefetch": 1,
        "gradients": {"codec": "none", "route": "exchange"},
    },
    "fsdp2-kept": {"engine": "fsdp2", "reshard_after_forward": False},
    "fsdp2-int8": {"engine": "fsdp2", "gradients": {"codec": INT8}},
    "manual-int8": {
        "engine": "manual",
        "gradients": {"codec": INT8},
        "weights": {"codec": INT8},
    },
    "slide-reduced": {"engine": "slide", "param_transfer": "shard", "grad_sync": "gpu_reduce"},
}
UNITS = [203_000, 112_000, 112_000]
"""elements: the root, then two blocks"""
OPERATIONS: tuple[Operation, ...] = ("exchange", "gather", "all_reduce", "reduce_scatter")

MEMORY: tuple[MemoryOperation, ...] = ("copy", "update")
MACHINE = Machine(
    transport={
        name: Line(1e-4 * number, 2e-10 * number) for number, name in enumerate(OPERATIONS, 1)
    },
    codecs={(INT8, False): CodecLines(Line(2e-5, 1e-9), Line(1e-5, 5e-10), Line(8.0, 1 + 4 / 128))},
    memory={name: Line(1e-6 * number, 1e-10 * number) for number, name in enumerate(MEMORY, 1)},
)
_ALONE = Compute(6.9e-3, 13.8e-3, 2.3e-3)
MODEL = PerformanceModel(
    machine=MACHINE,
    cores=2.0,
    compute={1: _ALONE, 2: _ALONE.scaled(1.15)},
    launch_s={
        **dict.fromkeys(ENGINES, 1e-4),
        "ddp": 5e-5,
        "fsdp1": 4e-4,
        "fsdp2": 3e-4,
        "slide": 2e-5,
    },
    wait_s=1.8e-3,
)


def made_run(
    timing: str, run: str, world_size: int = 2, rate: str | None = None, **changes: Any
) -> TimingResult:
    """Timing that `MODEL` would measure; `changes` replace fields."""
    bound = run == NO_COMMUNICATION
    strategy = None if bound else parse_strategy(STRATEGIES[run])
    bits = None if rate is None else bits_per_second(rate)
    has_units = strategy is None or "wrap" in strategy.traits.settings
    sizes = UNITS if has_units else [sum(UNITS)]
    facts: dict[str, Any] = {
        **timed_facts(timing, run, world_size, bits, strategy),
        "parameters": sum(UNITS),
        "units": [UnitSize(name=f"unit{i}", elements=n) for i, n in enumerate(sizes)],
        "step_ms": [1.0],
        "bytes_raw": 0.0,
        "bytes_wire": 0.0,
        "interface_bytes": None,
        "interface_frames": None,
        "ledger": make_ledger(strategy.engine if strategy else "ddp", 1.0),
        # passes are divided as those of `_ALONE`
        "breakdown": make_breakdown(1e3 * sum(_ALONE), 0.0, 0.1),
    }
    made = TimingResult(**{**facts, **changes})
    if "step_ms" in changes:
        return made
    if bound:
        seconds = sum(MODEL.computing(workload_of(made))) * max(1.0, world_size / 2)
    else:
        seconds = predicted(MODEL, made)
    return made.model_copy(update={"step_ms": [1e3 * seconds] * 5})


def predicted(model: PerformanceModel, run: TimingResult) -> float:
    """Seconds of a step of a run."""
    return model.predict(*case_of(run))


def made_timings() -> list[TimingResult]:
    """One rank, two, four, and two links."""
    places = [
        ("one-rank", 1, None),
        ("two-ranks", 2, None),
        ("four-ranks", 4, None),
        ("slow", 2, "100mbit"),
        ("fast", 2, "1gbit"),
    ]
    runs = ["ddp", "fsdp2", "fsdp2-int8", "manual", "manual-int8", NO_COMMUNICATION]
    return [made_run(timing, run, size, rate) for timing, size, rate in places for run in runs]


def made_calibration(machine: Machine = MACHINE) -> Calibration:
    """Operations of two ranks, codecs, and memory, of a machine."""
    costs = MeasuredCosts(machine, 2, 2)
    transfers = [
        Transfer(
            operation=operation,
            world_size=2,
            link="loopback",
            nbytes=nbytes,
            wire_bytes=wire_bytes(operation, nbytes, 2),
            seconds=[section_seconds([(costs.transfer(operation, nbytes),)], costs.rank)] * 3,
        )
        for operation in OPERATIONS
        for nbytes in (1 << 12, 1 << 16, 1 << 20, 1 << 22)
    ]
    codecs = [
        CodecCost(
            codec=codec,
            error_feedback=feedback,
            elements=n,
            payload_bytes=round(lines.payload.at(n)),
            variable=lines.variable,
            encode_s=[lines.encode.at(n)] * 3,
            decode_s=[lines.decode.at(n)] * 3,
        )
        for (codec, feedback), lines in machine.codecs.items()
        for n in (1 << 10, 1 << 15, 1 << 20)
    ]
    memory = [
        MemoryCost(operation=name, nbytes=nbytes, seconds=[line.at(nbytes)] * 3)
        for name, line in machine.memory.items()
        for nbytes in (1 << 14, 1 << 18, 1 << 22)
    ]
    facts = {
        "revision": "x",
        "torch": "2.13.0+cpu",
        "host": HOST,
        "contention": QUIET,
        "kernels": "x",
    }
    return Calibration(transfers=transfers, codecs=codecs, memory=memory, **facts)
