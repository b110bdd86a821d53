"""One training run, from the plan to the files it leaves."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from shardlab.core.files import write_json, write_json_lines
from shardlab.core.progress import say
from shardlab.data.loader import Batches
from shardlab.data.tokens import open_split
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.kernels import native
from shardlab.profiling.capture import Capture
from shardlab.profiling.merge import merge_traces
from shardlab.train.gather import gather_bytes, gather_values
from shardlab.train.launch import Start, launch
from shardlab.train.loop import Loop, StepEvent
from shardlab.train.plan import RunPlan
from shardlab.train.saved_model import save_model
from shardlab.train.summary import Measured, describe, merge_events, summarize
from shardlab.train.telemetry import Telemetry
from shardlab.train.untrained import build_for


def train_run(
    plan: RunPlan,
    folder: Path,
    telemetry: Path | None = None,
    limit_s: float | None = None,
    start: Start | None = None,
) -> None:
    """Trains by `plan` on all ranks and fills `folder`.

    Leaves metrics.json (last of all), events.jsonl, trace.json.gz and final_model/.

    Args:
        telemetry: folder for TensorBoard, or None.
        limit_s: longest duration of the whole run.
        start: of the ranks, when it is not by this command alone.

    Raises:
        RunFailed: a rank failed or time ran out; nothing in `folder` looks finished.
        UserError: the data or the model cannot be used.
    """
    train = plan.train
    native.library()  # says once, and not once per rank, when there are no compiled kernels
    worker = partial(_work, plan, folder, telemetry)
    launch(worker, train.world_size, train.threads, train.timeout_s, limit_s, start=start)


def _work(
    plan: RunPlan, folder: Path, telemetry_folder: Path | None, group: dist.ProcessGroup
) -> None:
    train = plan.train
    chief = dist.get_rank(group) == 0
    split = open_split(plan.data / "tokens", "train")
    model = build_for(plan.model, train, plan.seed, split)
    # wrapping takes the model apart: what describes it is read before
    parameters = sum(p.numel() for p in model.parameters())
    optimization = Optimization(train.weight_decay, train.clip)
    engine = build_engine(model, plan.strategy, optimization, group, plan.seed)
    batches = Batches(split, train.sequence_length, plan.seed)
    loop = Loop(engine, batches, train, group)
    telemetry = None
    if chief and telemetry_folder is not None:
        telemetry = Telemetry(telemetry_folder, loop.tokens_per_step)
    events = _timed_steps(engine, loop, plan, telemetry)
    ledger = engine.ledger.summary()
    full = engine.full_parameters()
    _check_equal_on_all_ranks(full, group)
    if chief:
        save_model(model, full, plan.data / "tokenizer.json", folder / "final_model")
    audit = _audited_steps(engine, loop, train.audit_steps)
    trace = _profiled_steps(loop, train.profiled_steps)
    mine = Measured.of_this_rank([asdict(e) for e in events], ledger, engine, audit)
    ranks = [Measured(**values) for values in gather_values(asdict(mine), group)]
    traces = gather_bytes(trace, group)
    if chief:
        _write(plan, folder, parameters, ranks, traces, loop.tokens_per_step)


def _timed_steps(
    engine: Engine, loop: Loop, plan: RunPlan, telemetry: Telemetry | None
) -> list[StepEvent]:
    train = plan.train
    events = loop.run(train.untimed_steps, telemetry)
    engine.ledger.reset()
    events += loop.run(train.steps - train.untimed_steps, telemetry)
    if telemetry is not None:
        telemetry.close()
        last = events[-1]
        say(f"{plan.run} seed {plan.seed}: loss {last.loss:.3f} after {train.steps} steps")
    return events


def _audited_steps(engine: Engine, loop: Loop, steps: int) -> dict[str, float] | None:
    if steps == 0:
        return None
    with engine.audit() as audit:
        loop.run(steps)
    return asdict(audit)


def _profiled_steps(loop: Loop, steps: int) -> bytes:
    with TemporaryDirectory(prefix="shardlab-trace-") as folder:
        path = Path(folder, "trace.json.gz")
        with Capture(steps) as capture:
            for _ in range(capture.calls):
                loop.run(1)
                capture.step()
        capture.export(path)
        return path.read_bytes()


def _check_equal_on_all_ranks(
    parameters: dict[str, torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Replicas that drifted apart are the bug that no loss curve shows."""
    sums = torch.stack([p.double().sum() for p in parameters.values()])
    highest, lowest = sums.clone(), sums.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    if not torch.equal(highest, lowest):
        names = [n for n, same in zip(parameters, highest == lowest, strict=True) if not same]
        raise RuntimeError(f"ranks hold different parameters after training: {names[:3]}")


def _write(
    plan: RunPlan,
    folder: Path,
    parameters: int,
    ranks: Sequence[Measured],
    traces: list[bytes],
    tokens_per_step: int,
) -> None:
    metrics = {
        **describe(plan, parameters),
        **summarize(plan, ranks, tokens_per_step),
    }
    write_json_lines(folder / "events.jsonl", merge_events(ranks, tokens_per_step))
    with TemporaryDirectory(prefix="shardlab-traces-") as temporary:
        paths = []
        for rank, content in enumerate(traces):
            paths.append(Path(temporary, f"rank{rank}.json.gz"))
            paths[-1].write_bytes(content)
        merge_traces(paths, folder / "trace.json.gz")
    write_json(folder / "metrics.json", metrics)
