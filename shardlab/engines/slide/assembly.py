"""The parts of a slide engine, put together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardlab.comm.ledger import Ledger
from shardlab.engines.precision import dtype_of
from shardlab.engines.setup import Setup
from shardlab.engines.slide.arrivals import Arrivals
from shardlab.engines.slide.control import Control
from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.departures import Departures
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.model import Sliding
from shardlab.engines.slide.moments import MomentStore
from shardlab.engines.slide.processors import update_workers
from shardlab.engines.slide.ranks import Ranks
from shardlab.engines.slide.schedule import Schedule
from shardlab.engines.slide.unit import Precision, SlidUnit
from shardlab.engines.slide.updates import Updates
from shardlab.engines.slide.window import Window
from shardlab.engines.units import UnitPlan, owned_parameters


def make_units(
    model: nn.Module, plans: Sequence[UnitPlan], setup: Setup, ranks: Ranks
) -> list[SlidUnit]:
    """The root, then those of `plans`, without memory."""
    precision = precision_of(setup, ranks)
    slots = ranks.world_size if setup.strategy.grad_sync == "cpu_reduce" else 1
    return [
        SlidUnit(index, name, own, ranks.rank, ranks.world_size, precision, slots)
        for index, (name, own) in enumerate(owned_parameters(model, plans))
    ]


def precision_of(setup: Setup, ranks: Ranks) -> Precision:
    """The types that all units have."""
    strategy, device = setup.strategy, setup.device
    computed = dtype_of(strategy.param_dtype, device)
    landed = computed if ranks.reductions is None else dtype_of(strategy.reduce_dtype, device)
    return Precision(computed, landed, dtype_of(strategy.moment_dtype, device))


class Parts(NamedTuple):
    """What all parts of an engine refer to."""

    setup: Setup
    ranks: Ranks
    copies: Copies
    control: Control
    faults: Faults
    ledger: Ledger


def make_updates(
    parts: Parts, module: Sliding, moments: MomentStore, order: Sequence[SlidUnit]
) -> Updates:
    """What applies gradients in main memory.

    Args:
        module: whose collectives are attached.
        order: of updates, see `Updates`.
    """
    setup, ranks = parts.setup, parts.ranks
    return Updates(
        parts.control,
        parts.faults,
        ranks.world_size,
        ranks.sums,
        None if setup.strategy.grad_sync == "gpu_reduce" else module.reduce,
        module.average,
        parts.ledger,
        update_workers(ranks.here, setup.device),
        moments,
        order,
        setup.seed,
    )


def make_schedule(
    parts: Parts, module: Sliding, units: Sequence[SlidUnit], updates: Updates, holding: bool
) -> Schedule:
    """What moves the units, the root and others.

    Args:
        module: whose collectives are attached.
        holding: see `Schedule`.
    """
    setup, ranks, copies, control, faults, ledger = parts
    (root, *others), strategy, device = units, setup.strategy, setup.device
    computed, landed, _ = precision_of(setup, ranks)
    reduce = module.reduce if strategy.grad_sync == "gpu_reduce" else None
    return Schedule(
        root,
        others,
        torch.empty(root.size, dtype=computed, device=device),
        Window(strategy.window or 2, max(unit.size for unit in others), computed, device),
        Arrivals(copies, control, faults, module.gather, ledger, ranks.rank, ranks.world_size),
        Departures(copies, updates, faults, reduce, landed, device),
        updates,
        holding,
    )
