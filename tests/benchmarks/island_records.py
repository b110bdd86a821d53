"""Records and timings of the island experiment, made for tests."""

from collections.abc import Mapping

from benchmarks.islands.methods import METHODS, parameters, strategies
from benchmarks.islands.timing import Steps, timing_path
from benchmarks.islands.training import Run
from shardlab.core.files import write_json
from shardlab.results.files import write_results
from shardlab.results.timing_result import NO_COMMUNICATION
from tests.timed_run_factory import make_timed


def trained(
    method: str,
    losses: Mapping[tuple[int, int], float],
    rate: float = 0.003,
    folder: str = "runs",
) -> None:
    """Write records of runs at one learning rate, by seed and steps."""
    for (seed, steps), loss in losses.items():
        run = Run(method, steps, seed, rate, folder)
        strategy = strategies()[METHODS[method].strategy]
        facts = {"strategy_hash": strategy.hash(), "bytes_wire": 1.0, "parameters": 10}
        write_json(run.path, {**run._asdict(), **facts, "val_loss": loss})


def timed(link: str, steps_ms: Mapping[tuple[Steps, str], list[float]], **changes: object) -> None:
    """Write the timing of steps on a link."""
    train, runs = parameters()("train"), []
    for (steps, run), step_ms in steps_ms.items():
        strategy = strategies().get(run)
        facts = {
            "strategy": strategy and strategy.canonical().model_dump(mode="json"),
            "strategy_hash": strategy and strategy.hash(),
            "model": parameters()("model").name,
            "batch_size": train.batch_size,
            "sequence_length": train.sequence_length,
            "accumulation": steps.accumulation,
        }
        runs.append(
            make_timed("one", run, steps.world_size, step_ms=step_ms, **{**facts, **changes})
        )
    write_results(timing_path(link), runs)


TWO_RANKS = Steps(2, 1)
STEPS = {
    (TWO_RANKS, "ddp"): [200.0, 220.0],
    (TWO_RANKS, "ddp-bf16"): [150.0, 165.0],
    (TWO_RANKS, "ddp-int4"): [120.0, 132.0],
    (TWO_RANKS, NO_COMMUNICATION): [100.0, 110.0],
    (Steps(1, 1), NO_COMMUNICATION): [80.0, 88.0],
    (Steps(1, 2), NO_COMMUNICATION): [150.0, 165.0],
}
