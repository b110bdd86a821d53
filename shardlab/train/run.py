"""One training run: from its plan to its output files."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from shardlab.checkpoint.checkpoints import Checkpoints
from shardlab.checkpoint.folder import Folder
from shardlab.core.files import write_json, write_json_lines
from shardlab.core.progress import say
from shardlab.data.tokens.loader import Batches
from shardlab.data.tokens.tokens import open_split
from shardlab.emulation.link import Emulation, emulated
from shardlab.engines.build import build_engine
from shardlab.engines.common.base import Engine, Optimization
from shardlab.engines.common.numerics import dtype_of, uses_fp16
from shardlab.evaluation.validate import save_model
from shardlab.kernels import native
from shardlab.launch import launch
from shardlab.loop.loop import Loop, StepEvent, traced_steps, write_trace_of
from shardlab.loop.plan import RunPlan, ensure_tokens
from shardlab.loop.summary import Measured, describe, merge_events, summarize, with_rates
from shardlab.models.build import build_model
from shardlab.train.outputs import Telemetry, gather_trained, write_traces
from shardlab.train.utilization import MemoryMeter, flops_per_token, placements, product_flops_per_s
from shardlab.transport.object_collectives import device_of, gather_bytes, gather_values


def train_run(
    plan: RunPlan,
    folder: Path,
    telemetry: Path | None = None,
    limit_s: float | None = None,
    checkpoints: Path | None = None,
    max_restarts: int = 0,
) -> None:
    """Train by `plan` on all ranks and write the results into `folder`.

    These are metrics.json (last), events.jsonl, trace.json.gz and final_model/.

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
            but not all ranks are this command's, or they compute on GPUs.
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
    chief = dist.get_rank(group) == 0
    device = device_of(group)
    if plan.tokens is not None:
        ensure_tokens(plan.data, plan.tokens, dist.get_rank(group), train.timeout_s)
    placed = placements(group)
    memory = MemoryMeter(device)
    model, engine, loop, parameters, flops = _prepared(plan, link, device, group)
    checkpoints = None
    if folders.checkpoints is not None and train.checkpoint is not None:
        checkpoints = Checkpoints(plan, train.checkpoint, folders.checkpoints, engine, loop, group)
    scalars = folders.telemetry if chief else None
    events = _timed_steps(engine, loop, plan, scalars, checkpoints)
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
        uses_fp16(plan.strategy.canonical(), device),
    )
    ranks = [Measured(**values) for values in gather_values(asdict(mine), group)]
    traces = gather_bytes(trace, group)
    if chief:
        setting = describe(plan, parameters, link.kind, placed)
        _write(plan, folders, setting, ranks, traces)


class _Prepared(NamedTuple):
    model: PreTrainedModel
    engine: Engine
    loop: Loop
    parameters: int
    flops_per_token: float


def _prepared(
    plan: RunPlan, link: Emulation, device: torch.device, group: dist.ProcessGroup
) -> _Prepared:
    train = plan.train
    split = open_split(plan.data / "tokens", "train")
    model, weights = build_model(
        plan.model, split.vocabulary, train.sequence_length, split.end_of_text, plan.seed
    )
    # read before the engine wraps the model and shards its parameters
    parameters = sum(p.numel() for p in model.parameters())
    flops = flops_per_token(model, train.sequence_length)
    accumulation = plan.strategy.accumulation or train.accumulation
    optimization = Optimization(train.weight_decay, train.clip, accumulation=accumulation)
    build = partial(build_engine, model, plan.strategy, optimization, group, plan.seed)
    engine = build(weights, device, link.throttle)
    batches = Batches(split, train.sequence_length, plan.seed)
    loop = Loop(engine, batches, train, group, plan.strategy.accumulation)
    return _Prepared(model, engine, loop, parameters, flops)


def _timed_steps(
    engine: Engine,
    loop: Loop,
    plan: RunPlan,
    scalars: Path | None,
    checkpoints: Checkpoints | None,
) -> list[StepEvent]:
    """Run the steps of the experiment; `scalars` is a folder for TensorBoard."""
    train = plan.train
    telemetry = None if scalars is None else Telemetry(scalars, train.clip)
    events: list[StepEvent] = []

    def show(event: StepEvent) -> None:
        events.append(event)
        if telemetry is not None:
            telemetry.write(event)

    def after(event: StepEvent) -> None:
        show(event)
        if checkpoints is not None:
            checkpoints.step_done(events)

    if checkpoints is not None:
        for event in checkpoints.resume():
            show(event)
    if loop.step <= train.untimed_steps:
        loop.run(train.untimed_steps - loop.step, after)
        engine.ledger.reset()
    loop.run(train.steps - loop.step, after)
    if checkpoints is not None:
        checkpoints.finish()
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
