"""One training run: ranks, model, engine, loop, evaluation, and whether replicas are equal."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from shardlab.comm.emulated_link import Emulation, emulated
from shardlab.comm.object_collectives import device_of, gather_values
from shardlab.core.device import compute_deterministically
from shardlab.core.files import read_json, refuse_damage, write_json, write_json_lines
from shardlab.core.host import CpuMeter, CpuTimes
from shardlab.core.progress import say
from shardlab.data.tokens import MANIFEST, TokenSplit
from shardlab.engines.base import Engine
from shardlab.kernels import native
from shardlab.models.parts import hidden_matrices
from shardlab.models.units import dtype_of
from shardlab.strategy.settings import DTYPE_BYTES
from shardlab.train.agreement import open_training_tokens, refuse_differences
from shardlab.train.checkpoint_folder import Folder
from shardlab.train.checkpoints import Checkpoints
from shardlab.train.evaluation import save_model
from shardlab.train.header import sharding
from shardlab.train.launch import launch
from shardlab.train.loop import (
    BuiltLoop,
    Loop,
    StepEvent,
    build_loop,
    has_diverged,
    traced_steps,
    write_trace_of,
)
from shardlab.train.outputs import (
    REPLICA_CHECK_EVERY,
    Telemetry,
    check_replicas,
    check_space,
    gather_trained,
    write_traces,
)
from shardlab.train.plans import RunPlan
from shardlab.train.summary import RankMeasurements, describe, merge_events, summarize, with_rates
from shardlab.train.utilization import MemoryMeter, placements, product_flops_per_s
from shardlab.train.validation_curve import Validator


class Places(NamedTuple):
    """Paths of checkpoints, as `train_run` takes them."""

    root: Path
    kept: Path | None
    resume: Path | None


def train_run(
    plan: RunPlan,
    folder: Path,
    telemetry: Path | None = None,
    limit_s: float | None = None,
    checkpoints: Path | None = None,
    max_restarts: int = 0,
    kept: Path | None = None,
    resume: Path | None = None,
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
        kept: folder on the same file system to which a complete run moves them instead.
        resume: a checkpoint to begin from, where the run has none yet.

    With `train.link` the ranks use an emulated link.

    Raises:
        RunFailed: a rank failed or time ran out; nothing in `folder` looks finished.
        UserError: the data, the model or a checkpoint cannot be used; or there is a link,
            but not all ranks are this command's, or they compute on GPUs; or replicas differ.
    """
    train = plan.train
    native.library()  # says once, and not once per rank, when there are no compiled kernels
    with emulated(train.link, train.world_size) as link:
        places = None if checkpoints is None else Places(checkpoints, kept, resume)
        worker = partial(_train, plan, folder, telemetry, places, link)
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


def _train(
    plan: RunPlan,
    folder: Path,
    logs: Path | None,
    places: Places | None,
    link: Emulation,
    group: dist.ProcessGroup,
) -> None:
    refuse_differences(plan, group)
    train = plan.train
    is_chief = dist.get_rank(group) == 0
    device = device_of(group)
    if train.deterministic:
        compute_deterministically()
    placement = placements(group)
    memory = MemoryMeter(device)

    # data and model; what is needed after the steps is checked before them
    dataset, split = _open_data(plan.data)
    built = build_loop(plan.model, plan.strategy, train, split, plan.seed, link.throttle, group)
    engine, loop = built.engine, built.loop
    _say_sharding(plan, built, group)
    if is_chief:
        check_space(_expected_bytes(plan, folder, places, built.parameters))

    # the steps of the experiment
    checkpoints = None
    if places is not None and train.checkpoint is not None:
        state = places.root, engine, loop, group, places.resume
        checkpoints = Checkpoints(plan, train.checkpoint, *state)
    telemetry = Telemetry(logs) if logs is not None and is_chief else None
    events, cpu_times = _timed_steps(built, plan, memory, telemetry, checkpoints, group)
    engine.synchronize()
    check_replicas(engine, loop.step, group)
    ledger, memory_use = engine.ledger.summary(), memory.used()

    # the trained model, before further steps change it
    products = product_flops_per_s(device, dtype_of(plan.strategy.param_dtype, device), group)
    trained = gather_trained(engine, group)
    if is_chief:
        save_model(built.model, trained, plan.data / "tokenizer.json", folder / "final_model")
    del trained

    # more steps: some whose reductions are also done exactly, and some that are traced
    audit = _audited(engine, loop, train.audit_steps)
    trace = traced_steps(loop, train.profiled_steps, plan.strategy.sync)

    mine = RankMeasurements(
        events=[asdict(event) for event in events],
        ledger=ledger,
        audit=audit,
        residual_norm=engine.residual_norm(),
        memory=memory_use,
        flops_per_token=built.flops_per_token,
        product_flops_per_s=products,
        loss_scaled=built.loss_scaled,
        cpu_times=cpu_times,
    )
    ranks = [RankMeasurements(**values) for values in gather_values(asdict(mine), group)]
    traces = gather_values(trace, group)
    if is_chief:
        setting = describe(plan, dataset, built.parameters, link.kind, placement)
        _write(plan, folder, logs, setting, ranks, traces)
        if places is not None:
            if places.kept is not None:
                Folder(places.root).keep(places.kept)
            Folder(places.root).remove()


def _say_sharding(plan: RunPlan, built: BuiltLoop, group: dist.ProcessGroup) -> None:
    held = gather_values(built.engine.held_elements(), group)
    if dist.get_rank(group) == 0:
        matrices = hidden_matrices(built.model) if plan.train.optimizer == "muon" else ()
        say(sharding(plan, built.units, held, sum(matrix.numel() for matrix in matrices)))


def _audited(engine: Engine, loop: Loop, steps: int) -> dict[str, float] | None:
    """Return the errors of the reductions of the next steps; None of no steps."""
    if not steps:
        return None
    with engine.audit() as measured:
        loop.run(steps)
    return asdict(measured)


def _write(
    plan: RunPlan,
    folder: Path,
    logs: Path | None,
    setting: dict[str, Any],
    ranks: Sequence[RankMeasurements],
    traces: list[bytes],
) -> None:
    events = merge_events([rank.events for rank in ranks])
    write_json_lines(folder / "events.jsonl", with_rates(plan, events))
    write_trace_of(traces, folder / "trace.json.gz")
    if logs is not None:
        write_traces(logs, traces)
    # last: a run without it is not finished
    metrics = summarize(plan, events, ranks)
    write_json(folder / "metrics.json", {**setting, **metrics})
    say(f"train {plan.run} seed {plan.seed}: {_outcome(metrics, plan.train.steps)}")


def _outcome(metrics: Mapping[str, Any], steps: int) -> str:
    if (diverged := metrics["diverged_at"]) is None:
        return f"{metrics['step_ms_mean']:.1f} ms/step, loss {metrics['train_loss']:.2f}"
    return (
        f"diverged at step {diverged}: loss or gradient not finite; stopped after "
        f"{metrics['steps']} of {steps} steps: lower train.learning_rate, or change the strategy"
    )


def _open_data(data: Path) -> tuple[str, TokenSplit]:
    """Return the name of the data set and its tokens to train on, verified on each node."""
    dataset = read_json(data / "source.json", "run shardlab prepare")["name"]
    split = open_training_tokens(data)
    if os.environ["LOCAL_RANK"] == "0":
        tokenizer = {"tokenizer.json": split.tokenizer_sha256}
        refuse_damage(data, tokenizer, "run shardlab tokenize")
        # needed after the steps
        read_json(data / "tokenizer_config.json", "run shardlab tokenize")
    return dataset, split


def _expected_bytes(
    plan: RunPlan, folder: Path, places: Places | None, parameters: int
) -> dict[Path, int]:
    """Return the bytes of the model, and of the checkpoints that are still to be written."""
    expected = {folder: 4 * parameters}
    options = plan.train.checkpoint
    if places is not None and options is not None:
        moment = DTYPE_BYTES[plan.strategy.canonical().moment_dtype]
        # one is removed only after the next is complete
        present = len(Folder(places.root).steps())
        more = min(max(1, options.keep + 1 - present), plan.train.steps // options.every)
        copies = 0
        if plan.strategy.sync is not None:
            copies = plan.strategy.canonical().replica_count(plan.train.world_size)
        # each copy has parameters, moments, and two vectors of the outer optimizer
        expected[places.root] = more * (4 + 2 * moment + 20 * copies) * parameters
    return expected


def _timed_steps(
    built: BuiltLoop,
    plan: RunPlan,
    memory: MemoryMeter,
    telemetry: Telemetry | None,
    checkpoints: Checkpoints | None,
    group: dist.ProcessGroup,
) -> tuple[list[StepEvent], CpuTimes]:
    """Run the steps of the experiment until the last, or until the run has diverged.

    Returns:
        events of all steps, and CPU times of those that were timed, since a resumption.
    """
    train, engine, loop = plan.train, built.engine, built.loop
    events: list[StepEvent] = []
    validator = None
    if train.validation is not None:
        validator = Validator(plan, engine, group, before=memory.stop)

    def after(event: StepEvent) -> bool:
        used = memory.used()
        event.memory_peak_bytes = used["memory_peak_bytes"] or 0
        event.memory_reserved_bytes = used["memory_reserved_bytes"]
        if validator is not None:
            event.val_loss = validator.loss_after(loop.step)
        add(event)
        if loop.step % REPLICA_CHECK_EVERY == 0:
            check_replicas(engine, loop.step, group)
        if checkpoints is not None:
            checkpoints.step_done(events)
        return diverged()

    def diverged() -> bool:
        # copies that train alone do not know of one that diverges, and meet at the exchanges
        return plan.strategy.sync is None and has_diverged(events, built.loss_scaled)

    def add(event: StepEvent) -> None:
        event.count(events[-1] if events else None, train.clip)
        events.append(event)
        if telemetry is not None:
            telemetry.write(event)

    if checkpoints is not None:
        for event in checkpoints.resume():
            add(event)
    meter = CpuMeter()
    if loop.step <= train.untimed_steps and not diverged():
        loop.run(train.untimed_steps - loop.step, after, residual_norms=True)
        if not diverged():
            if plan.strategy.sync is None:  # else the bytes of a step are those of the whole run
                engine.ledger.reset()
            meter = CpuMeter()
    if not diverged():
        loop.run(train.steps - loop.step, after, residual_norms=True)
    cpu_times = meter.read()
    if checkpoints is not None:
        checkpoints.wait()
    engine.ledger.wait()  # the events' times in collectives, before they are shown
    if telemetry is not None:
        telemetry.close()
    return events, cpu_times


def build_missing_tokens(tokens: Path, rank: int, build: Callable[[], object]) -> None:
    """Build token shards on rank 0 where there are none, while other ranks poll for the manifest.

    To be called before `train_run`, whose collectives could time out; a build may take any time.

    Args:
        tokens: folder that all nodes share.
    """
    manifest = tokens / MANIFEST
    if manifest.is_file():
        return
    if rank == 0:
        build()
        return
    say(f"rank {rank}: waits until rank 0 has written {manifest}, in a folder that all nodes share")
    while not manifest.is_file():
        time.sleep(0.1)
