"""Headers of results, from the plan of what is measured."""

from collections.abc import Sequence
from typing import Any

import torch

from shardlab.core.host import describe_host, git_revision
from shardlab.core.launch_environment import node_count
from shardlab.core.link import connection_name
from shardlab.core.numbers import number, plural
from shardlab.kernels import native
from shardlab.results.result import Failure, FailureOutcome, LinkEmulation, UnitSize
from shardlab.results.timing_result import NO_COMMUNICATION
from shardlab.strategy.settings import DTYPE_BYTES
from shardlab.train.plans import RunPlan, TimingPlan


def header(
    plan: RunPlan | TimingPlan,
    run: str,
    parameters: int | None = None,
    emulation: LinkEmulation | None = None,
) -> dict[str, Any]:
    """Return the header of the result of a run on this machine.

    Args:
        run: one of those of the plan.
        parameters, emulation: None where they are not known yet.
    """
    if isinstance(plan, RunPlan):
        train = plan.train
        kind, name, seed, strategy = "train", "", plan.seed, plan.strategy
        world_size, link = train.world_size, train.link
    else:
        train = plan.samples
        kind, name, seed, strategy = plan.kind, plan.name, 0, plan.runs[run]
        world_size, link = plan.timing.world_size, plan.timing.link
    alone = run == NO_COMMUNICATION
    return {
        "kind": kind,
        "timing": name,
        "run": run,
        "seed": seed,
        "strategy": None if alone else strategy.canonical().model_dump(mode="json"),
        "strategy_hash": None if alone else strategy.hash(),
        "world_size": world_size,
        "model": plan.model.name,
        "parameters": parameters,
        "sequence_length": train.sequence_length,
        "batch_size": train.step_size(world_size).batch_size,
        "accumulation": train.accumulation,
        "link": connection_name(link, node_count(world_size)),
        "link_emulation": emulation,
        "bits_per_second": None if link is None else link.bits_per_second,
        "delay_ms": 0.0 if link is None else link.delay_ms,
        "ranks_per_node": 1 if link is None else link.ranks_per_node,
        "revision": git_revision(),
        "torch": torch.__version__,
        "host": describe_host(),
        "kernels": native.serving(),
    }


def sharding(
    plan: RunPlan, units: Sequence[UnitSize], held: Sequence[int], matrices: int = 0
) -> str:
    """Return in a line what a strategy gathers or reduces together, and what each rank keeps.

    Args:
        units: of the model.
        held: elements of parameters on each rank.
        matrices: elements of those with one moment in place of two, which Muon trains.
    """
    strategy, total = plan.strategy.canonical(), sum(unit.elements for unit in units)
    kinds: dict[int, list[str]] = {}
    for unit in units:
        kinds.setdefault(unit.elements, []).append(unit.name)
    parts = ", ".join(
        f"{names[0] if len(names) == 1 else plural(len(names), 'unit')} of {number(elements)}"
        for elements, names in kinds.items()
        if elements
    )
    least, most = min(held), max(held)
    kept = f"{least:,} to {most:,}" if least < most else f"{most:,}"
    kept = "all" if least == most == total else f"{kept} ({100 * most / total:.3g} %)"
    states = 4 * most + DTYPE_BYTES[strategy.moment_dtype] * (2 * most - matrices)
    return (
        f"{plan.run} seed {plan.seed}: {strategy.engine}, {total:,} parameters ({parts}); each of "
        f"{plural(len(held), 'rank')} keeps {kept}, {number(4 * most, 'B')} and with moments "
        f"{number(states, 'B')}"
    )


def failure(
    plan: RunPlan | TimingPlan,
    run: str,
    outcome: FailureOutcome,
    detail: str,
) -> Failure:
    """Return the failure of a run of a plan.

    Args:
        detail: text of the error.
    """
    params_hash = plan.params_hash() if isinstance(plan, RunPlan) else ""
    facts = {"outcome": outcome, "detail": detail, "params_hash": params_hash}
    return Failure.model_validate({**header(plan, run), **facts})
