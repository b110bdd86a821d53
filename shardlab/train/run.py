"""One training run: from its plan to its output files."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from shardlab.codecs.kernels import native
from shardlab.comm.emulated_link import Emulation, emulated
from shardlab.comm.object_collectives import device_of, gather_bytes, gather_values
from shardlab.config.settings import DTYPE_BYTES
from shardlab.core.determinism import compute_deterministically
from shardlab.core.files import read_json, refuse_damage, write_json, write_json_lines
from shardlab.core.host import CpuMeter, CpuTimes
from shardlab.core.progress import say
from shardlab.data.loader import Batches
from shardlab.data.tokens import open_split
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.step_space import refuse_too_large
from shardlab.models.build import build_model
from shardlab.models.dtypes import dtype_of, uses_fp16
from shardlab.train.checkpoint_folder import Folder
from shardlab.train.checkpoints import Checkpoints
from shardlab.train.divergence import divergence_step, has_diverged
from shardlab.train.evaluation import save_model
from shardlab.train.launch import launch
from shardlab.train.loop import Loop, StepEvent, traced_steps, write_trace_of
from shardlab.train.outputs import Telemetry, gather_trained, probe, write_traces
from shardlab.train.replicas import REPLICA_CHECK_EVERY, check_replicas
from shardlab.train.run_plan import RunPlan
from shardlab.train.summary import Measured, describe, merge_events, summarize, with_rates
from shardlab.train.utilization import MemoryMeter, flops_per_token, placements, product_flops_per_s


def train_run(
    plan: RunPlan,
    folder: Path,
    telemetry: Path | None = None,
    limit_s: float | None = None,
    checkpoints: Path | None = None,
    max_restarts: int = 0,
) -> None:
    """Train by `plan` on all ranks and write the results into `folder`.

    These are metrics.json (last), events.jsonl, trace.json.gz and
    final_model/. A run that diverges stops, and writes them like any other: metrics.json says at
    which step.

    Args:
        telemetry: folder for TensorBoard, or None: scalars, and the trace of every rank.
        limit_s: longest duration of the whole run.
        checkpoints: folder for those of this run, if `train.checkpoint` is set. An interrupted run
            resumes from the last one; a complete run removes them.
        max_restarts: how often new ranks are started after one failed.

    With `train.link` the ranks use an emulated link.

    Raises:
        RunFailed: a rank failed or time ran out; nothing in `folder` looks finished.
        UserError: the data, the model or the last checkpoint cannot be used; or there is a link,
            but not all ranks are this command's, or they compute on GPUs; or replicas differ.
    """
    train = plan.train
    native.library()  # says once, and not once per rank, when there are no compiled kernels
    with emulated(train.link, train.world_size) as link:
        worker = partial(_work, plan, _Folders(folder, telemetry, checkpoints), link)
        launch(
            worker,
            train.world_size,
            train.threads,
            train.timeout_s,
            limit_s,
            links=link.links,
            max_restarts=max_restarts,
            placement=train.placement,
        )


class _Folders(NamedTuple):
    run: Path
    telemetry: Path | None
    checkpoints: Path | None


def _work(plan: RunPlan, folders: _Folders, link: Emulation, group: dist.ProcessGroup) -> None:
    train = plan.train
    if train.deterministic:
        compute_deterministically()
    chief = dist.get_rank(group) == 0
    device = device_of(group)
    placed = placements(group)
    memory = MemoryMeter(device)
    model, engine, loop, parameters, flops, dataset = _prepared(plan, link, device, group)
    if chief:
        probe(_expected_bytes(plan, folders, parameters))
    checkpoints = None
    if folders.checkpoints is not None and train.checkpoint is not None:
        checkpoints = Checkpoints(plan, train.checkpoint, folders.checkpoints, engine, loop, group)
    scalars = folders.telemetry if chief else None
    scaled = uses_fp16(plan.strategy.canonical(), device)
    events, times = _timed_steps(engine, loop, plan, scalars, checkpoints, scaled, group)
    ledger, used = engine.ledger.summary(), memory.used()
    products = product_flops_per_s(device, dtype_of(plan.strategy.param_dtype, device), group)
    trained = gather_trained(engine, group)
    if chief:
        save_model(model, trained, plan.data / "tokenizer.json", folders.run / "final_model")
    del trained
    audit = _audited_steps(engine, loop, train.audit_steps)
    trace = traced_steps(loop, train.profiled_steps)
    mine = Measured(
        [asdict(event) for event in events],
        ledger,
        audit,
        engine.residual_norm(),
        asdict(used),
        flops,
        products,
        scaled,
        times,
    )
    ranks = [Measured(**values) for values in gather_values(asdict(mine), group)]
    traces = gather_bytes(trace, group)
    if chief:
        setting = describe(plan, dataset, parameters, link.kind, placed)
        _write(plan, folders, setting, ranks, traces)


def _expected_bytes(plan: RunPlan, folders: _Folders, parameters: int) -> dict[Path, int]:
    """Return the bytes of the model, and of the checkpoints that are to come beside those kept."""
    expected = {folders.run: 4 * parameters}
    options = plan.train.checkpoint
    if folders.checkpoints is not None and options is not None:
        moment = DTYPE_BYTES[plan.strategy.canonical().moment_dtype]
        # one is removed only after the next is complete
        kept = len(Folder(folders.checkpoints).steps())
        more = min(max(1, options.keep + 1 - kept), plan.train.steps // options.every)
        expected[folders.checkpoints] = more * (4 + 2 * moment) * parameters
    return expected


class _Prepared(NamedTuple):
    model: PreTrainedModel
    engine: Engine
    loop: Loop
    parameters: int
    flops_per_token: float
    dataset: str


def _prepared(
    plan: RunPlan, link: Emulation, device: torch.device, group: dist.ProcessGroup
) -> _Prepared:
    train = plan.train
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    split = open_split(plan.data / "tokens", "train", slice(rank, None, world_size))
    # before the steps, although they are needed after them
    dataset = read_json(plan.data / "source.json", "run python -m stages.prepare")["name"]
    if rank == 0:
        expected = {"tokenizer.json": split.tokenizer_sha256}
        refuse_damage(plan.data, expected, "run python -m stages.tokenize")
    model, weights = build_model(
        plan.model, split.vocabulary, train.sequence_length, split.end_of_text, plan.seed
    )
    refuse_too_large(model, plan.strategy, train, device, group)
    # read before the engine wraps the model and shards its parameters
    parameters = sum(p.numel() for p in model.parameters())
    flops = flops_per_token(model, train.sequence_length)
    accumulation = plan.strategy.accumulation or train.accumulation
    optimization = Optimization(train.weight_decay, train.clip, accumulation=accumulation)
    build = partial(build_engine, model, plan.strategy, optimization, group, plan.seed)
    engine = build(weights, device, link.throttle)
    batches = Batches(split, train.sequence_length, plan.seed)
    loop = Loop(engine, batches, train, group, plan.strategy.accumulation)
    return _Prepared(model, engine, loop, parameters, flops, dataset)


def _timed_steps(
    engine: Engine,
    loop: Loop,
    plan: RunPlan,
    scalars: Path | None,
    checkpoints: Checkpoints | None,
    loss_scaled: bool,
    group: dist.ProcessGroup,
) -> tuple[list[StepEvent], CpuTimes]:
    """Run the steps of the experiment until the last, or until the run has diverged.

    Args:
        scalars: folder for TensorBoard.

    Returns:
        events of all steps, and CPU times of those that were timed, since a resumption.
    """
    train = plan.train
    telemetry = None if scalars is None else Telemetry(scalars, train.clip, device_of(group))
    events: list[StepEvent] = []
    diverged = partial(has_diverged, events, loss_scaled)

    def show(event: StepEvent) -> None:
        events.append(event)
        if telemetry is not None:
            telemetry.write(event)

    def after(event: StepEvent) -> bool:
        show(event)
        if loop.step % REPLICA_CHECK_EVERY == 0:
            check_replicas(engine, loop.step, group)
        if checkpoints is not None:
            checkpoints.step_done(events)
        return diverged()

    if checkpoints is not None:
        for event in checkpoints.resume():
            show(event)
    meter = CpuMeter()
    if loop.step <= train.untimed_steps and not diverged():
        loop.run(train.untimed_steps - loop.step, after)
        if not diverged():
            engine.ledger.reset()
            meter = CpuMeter()
    if not diverged():
        loop.run(train.steps - loop.step, after)
    times = meter.read()
    if checkpoints is not None:
        checkpoints.finish()
    engine.ledger.settle()  # the events' times in collectives, before they are shown
    if telemetry is not None:
        telemetry.close()
        say(f"{plan.run} seed {plan.seed}: {_outcome(events, train.steps)}")
    return events, times


def _outcome(events: Sequence[StepEvent], steps: int) -> str:
    diverged = divergence_step([vars(event) for event in events], steps)
    if diverged is None:
        return f"loss {events[-1].loss:.3f} after {steps} steps"
    return (
        f"diverged at step {diverged}: loss or gradient not finite; stopped after {len(events)} of "
        f"{steps} steps: lower train.learning_rate, or change the strategy"
    )


def _audited_steps(engine: Engine, loop: Loop, steps: int) -> dict[str, float] | None:
    if steps == 0:
        return None
    with engine.audit() as audit:
        loop.run(steps)
    return asdict(audit)


def _write(
    plan: RunPlan,
    folders: _Folders,
    setting: dict[str, Any],
    ranks: Sequence[Measured],
    traces: list[bytes],
) -> None:
    events = merge_events([rank.events for rank in ranks])
    metrics = {**setting, **summarize(plan, events, ranks)}
    write_json_lines(folders.run / "events.jsonl", with_rates(events))
    write_trace_of(traces, folders.run / "trace.json.gz")
    write_json(folders.run / "metrics.json", metrics)
    if folders.telemetry is not None:
        write_traces(folders.telemetry, traces)
    if folders.checkpoints is not None:
        Folder(folders.checkpoints).remove()
