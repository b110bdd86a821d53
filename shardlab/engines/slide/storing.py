"""Brings a model to host memory."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from shardlab.buffers.slide import leaving_bytes, window_bytes
from shardlab.comm.hierarchy import timeout_of
from shardlab.engines.common.setup import Setup
from shardlab.engines.common.units import UnitPlan
from shardlab.engines.slide.arrivals import UPDATED
from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.landings import TAKEN, Landings
from shardlab.engines.slide.moments import KINDS, FileMoments, MemoryMoments, Moments, MomentStore
from shardlab.engines.slide.node import NodeMemory
from shardlab.engines.slide.node_file import NodeFile
from shardlab.engines.slide.sums import LANDED
from shardlab.engines.slide.turns import ENDED, GATHERS, TURNS
from shardlab.engines.slide.unit import SlidUnit


def share_memory(
    units: Sequence[SlidUnit], landings: Landings, setup: Setup, here: dist.ProcessGroup
) -> NodeMemory:
    """Host memory for the units and what arrives, by all ranks of a node together.

    Raises:
        UserError: there is too little.
    """
    layout = landings.layout()
    for unit in units:
        layout |= unit.layout()
        if setup.strategy.moments == "memory":
            layout |= unit.moments_layout()
    world_size = dist.get_world_size(here)
    beside = world_size * _on_device(units, setup, world_size)
    timeout_s = timeout_of(here).total_seconds()
    kinds = UPDATED, LANDED, TAKEN, GATHERS, ENDED, TURNS
    memory = NodeMemory.create(here, layout, kinds, len(units), timeout_s, beside)
    for unit in units:
        unit.map(memory)
    landings.map(memory)
    return memory


def _on_device(units: Sequence[SlidUnit], setup: Setup, world_size: int) -> int:
    """Bytes of host memory that a rank will take as its device, at least: without activations."""
    if setup.device.type != "cpu":
        return 0
    full, itemsize = setup.strategy, units[0].precision.computed.itemsize
    root, *others = [unit.whole for unit in units]
    trained_root, *trained = [unit.size for unit in units]
    return window_bytes(full, itemsize, root, others) + leaving_bytes(
        full, itemsize, trained_root, [*filter(None, trained)], world_size
    )


def moments_in_memory(units: Sequence[SlidUnit], memory: NodeMemory) -> MomentStore:
    """Moments for the units, in memory that was shared for them, too."""
    for unit in units:
        unit.map_moments(memory)
    return MemoryMoments(
        {unit.name: Moments(*(unit.vectors[kind][unit.own] for kind in KINDS)) for unit in units}
    )


def moments_on_disk(
    units: Sequence[SlidUnit], here: dist.ProcessGroup, folder: Path
) -> MomentStore:
    """Moments for the units, in a file that the ranks of a node make together.

    Raises:
        UserError: (on all ranks) it cannot be made in the folder, or not that large.
    """
    layout: dict[str, int] = {}
    for unit in units:
        layout |= unit.moments_layout()
    file = NodeFile.create(here, layout, folder)
    for unit in units:
        unit.map_moments(file)
    dtype = units[0].precision.moments
    parts = {
        unit.name: [
            file.part(unit.region(kind), unit.first * dtype.itemsize, unit.chunk * dtype.itemsize)
            for kind in KINDS
        ]
        for unit in units
    }
    return FileMoments(file, parts, dtype)


def store(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    units: Sequence[SlidUnit],
    landings: Landings,
    setup: Setup,
    copies: Copies,
) -> None:
    """Host memory takes the weights, which are whole for one unit at a time; then none is shown.

    Args:
        units: the root, then those of `plans`.
    """
    root, *others = units
    whole = setup.strategy.param_transfer == "full"
    modules = [*(plan.modules for plan in plans), (model,)]
    for unit, of_unit in zip((*others, root), modules, strict=True):
        for module in of_unit:
            setup.fill(module)
        unit.store()
        unit.hide(setup.device)
        copies.pin(unit.source if whole else unit.own_source)
    for vector in landings.own():
        copies.pin(vector)
