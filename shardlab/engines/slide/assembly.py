"""The parts of a slide engine, put together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardlab.buffers.slide import Keeping, copied_whole, keeping, window_slots
from shardlab.comm.ledger import Ledger
from shardlab.core.errors import UserError
from shardlab.engines.common.precision import dtype_of, uses_fp16
from shardlab.engines.common.setup import Setup
from shardlab.engines.common.units import UnitPlan, owned_parameters
from shardlab.engines.slide.arrivals import Arrivals
from shardlab.engines.slide.control import Control
from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.departures import Departures
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.landings import Landings
from shardlab.engines.slide.model import Sliding
from shardlab.engines.slide.moments import MomentStore
from shardlab.engines.slide.processors import update_workers
from shardlab.engines.slide.ranks import Ranks
from shardlab.engines.slide.schedule import Schedule
from shardlab.engines.slide.sums import Sums
from shardlab.engines.slide.unit import Precision, SlidUnit
from shardlab.engines.slide.updates import Updates
from shardlab.engines.slide.window import Window


def make_units(
    model: nn.Module, plans: Sequence[UnitPlan], setup: Setup, ranks: Ranks
) -> list[SlidUnit]:
    """The root, then those of `plans`, without memory.

    Raises:
        UserError: a unit uses a parameter of another one, which is elsewhere then.
    """
    _refuse_shared(model, plans)
    precision, vectors = precision_of(setup, ranks), copied_whole(setup.strategy, ranks.world_size)
    slots = {"nothing": 0, "totals": 1}.get(keeping_of(setup), vectors)
    return [
        SlidUnit(index, name, own, ranks.rank, ranks.world_size, precision, slots)
        for index, (name, own) in enumerate(owned_parameters(model, plans))
    ]


def _refuse_shared(model: nn.Module, plans: Sequence[UnitPlan]) -> None:
    root, *others = owned_parameters(model, plans)
    owners = {p: (name, unit) for unit, own in (root, *others) for name, p in own.items()}
    modules = [
        (unit, module)
        for (unit, _), plan in zip(others, plans, strict=True)
        for each in plan.modules
        for module in each.modules()
    ]
    inside = {module for _, module in modules}
    modules += [(root[0], module) for module in model.modules() if module not in inside]
    for user, module in modules:
        for parameter in module.parameters(recurse=False):
            name, owner = owners[parameter]
            if owner != user:
                raise UserError(
                    f"slide: {name} belongs to {owner}, which leaves the device, and {user} uses "
                    "it, too: give each a parameter of its own, or choose another engine"
                )


def make_landings(units: Sequence[SlidUnit], setup: Setup, ranks: Ranks) -> Landings:
    """Where the gradients of the units arrive, without memory."""
    vectors = copied_whole(setup.strategy, ranks.world_size)
    root, *others = units
    leaving = [root, *(unit for unit in others if unit.count)]
    return Landings(leaving, ranks.rank, keeping_of(setup), vectors, ranks.sums)


def precision_of(setup: Setup, ranks: Ranks) -> Precision:
    """The types that all units have."""
    computed = landed = dtype_of(setup.strategy.param_dtype, setup.device)
    if ranks.reductions is not None:
        landed = dtype_of(setup.strategy.reduce_dtype, setup.device)
    kept = landed if keeping_of(setup) == "arrived" else torch.float32
    moments = dtype_of(setup.strategy.moment_dtype, setup.device)
    return Precision(computed, landed, kept, moments)


def keeping_of(setup: Setup) -> Keeping:
    """Which gradients stay in host memory."""
    return keeping(setup.strategy, setup.optimization.accumulation, holding(setup))


def holding(setup: Setup) -> bool:
    """Whether gradients are applied when all of them are there."""
    return setup.optimization.clip is not None or uses_fp16(setup.strategy, setup.device)


class Parts(NamedTuple):
    """What all parts of an engine refer to."""

    setup: Setup
    ranks: Ranks
    copies: Copies
    landings: Landings
    control: Control
    faults: Faults
    ledger: Ledger


def make_updates(
    parts: Parts, module: Sliding, moments: MomentStore, order: Sequence[SlidUnit]
) -> Updates:
    """What applies gradients in host memory.

    Args:
        module: whose collectives are attached.
        order: of updates, see `Updates`.
    """
    setup, ranks = parts.setup, parts.ranks
    sums = Sums(
        parts.control,
        ranks,
        keeping_of(setup),
        None if setup.strategy.grad_sync == "gpu_reduce" else module.reduce,
        module.average,
        parts.ledger,
    )
    workers = update_workers(ranks.here, setup.device)
    return Updates(parts.control, parts.faults, sums, workers, moments, order, setup.seed)


def make_schedule(
    parts: Parts, module: Sliding, units: Sequence[SlidUnit], updates: Updates
) -> Schedule:
    """What moves the units, the root and others.

    Args:
        module: whose collectives are attached.
    """
    setup, ranks, copies, landings, control, faults, ledger = parts
    (root, *others), strategy, device = units, setup.strategy, setup.device
    computed, landed, *_ = precision_of(setup, ranks)
    reduce = module.reduce if strategy.grad_sync == "gpu_reduce" else None
    slots = window_slots(strategy, len(others))
    return Schedule(
        root,
        others,
        torch.empty(root.whole, dtype=computed, device=device),
        Window(slots, max(unit.whole for unit in others), computed, device),
        Arrivals(copies, control, faults, module.gather, ledger, ranks.rank, ranks.world_size),
        Departures(copies, landings, updates, faults, reduce, landed, device),
        updates,
        holding(setup),
    )
