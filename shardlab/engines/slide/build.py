"""Construction of the parts of a slide engine, and of the host memory that they share."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardlab.comm.object_collectives import timeout_of
from shardlab.core.errors import UserError
from shardlab.engines.base import EngineSetup
from shardlab.engines.slide.copies import Copies, NodeContext
from shardlab.engines.slide.grad_offload import GradBuffers, GradOffload
from shardlab.engines.slide.groups import RankGroups
from shardlab.engines.slide.model import SlideModule
from shardlab.engines.slide.moments import KINDS, FileMoments, Moments, MomentStore
from shardlab.engines.slide.optimizer import GradReduction, HostOptimizer, update_workers
from shardlab.engines.slide.prefetch import Prefetcher, Window
from shardlab.engines.slide.schedule import Schedule
from shardlab.engines.slide.shared_file import NodeFile
from shardlab.engines.slide.shared_memory import NodeMemory
from shardlab.engines.slide.unit import Precision, SlideUnit
from shardlab.models.dtypes import dtype_of, uses_fp16
from shardlab.models.memory import (
    KeptGradients,
    gradient_vectors,
    kept_gradients,
    offload_bytes,
    window_bytes,
    window_slots,
)
from shardlab.models.units import UnitPlan, owned_parameters


def make_units(
    model: nn.Module, plans: Sequence[UnitPlan], setup: EngineSetup, groups: RankGroups
) -> list[SlideUnit]:
    """Return the root, then the units of `plans`, without memory.

    Raises:
        UserError: a unit uses a parameter of another one, which is not on the device then.
    """
    _refuse_shared(model, plans)
    precision = precision_of(setup, groups)
    vectors = gradient_vectors(setup.strategy, groups.world_size)
    slots = {"nothing": 0, "totals": 1}.get(keeping_of(setup), vectors)
    return [
        SlideUnit(index, name, own, groups.rank, groups.world_size, precision, slots)
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


def make_buffers(units: Sequence[SlideUnit], setup: EngineSetup, groups: RankGroups) -> GradBuffers:
    """Return the buffers of the units' gradients, without memory."""
    vectors = gradient_vectors(setup.strategy, groups.world_size)
    root, *others = units
    trained = [root, *(unit for unit in others if unit.count)]
    return GradBuffers(trained, groups.rank, keeping_of(setup), vectors, groups.sums)


def precision_of(setup: EngineSetup, groups: RankGroups) -> Precision:
    """Return the types of all units' vectors."""
    compute = offload = dtype_of(setup.strategy.param_dtype, setup.device)
    if groups.reductions is not None:
        offload = dtype_of(setup.strategy.reduce_dtype, setup.device)
    stored = offload if keeping_of(setup) == "arrived" else torch.float32
    moments = dtype_of(setup.strategy.moment_dtype, setup.device)
    return Precision(compute, offload, stored, moments)


def keeping_of(setup: EngineSetup) -> KeptGradients:
    """Return which gradients stay in host memory."""
    return kept_gradients(setup.strategy, setup.optimization.accumulation, holds_updates(setup))


def holds_updates(setup: EngineSetup) -> bool:
    """Return whether updates wait until the norm of the whole gradient is known."""
    return setup.optimization.clip is not None or uses_fp16(setup.strategy, setup.device)


def share_memory(
    units: Sequence[SlideUnit], buffers: GradBuffers, setup: EngineSetup, here: dist.ProcessGroup
) -> NodeMemory:
    """Allocate host memory for units and buffers; all ranks of a node call together.

    Raises:
        UserError: there is too little.
    """
    layout = buffers.layout()
    for unit in units:
        layout |= unit.layout()
        if setup.strategy.moments == "memory":
            layout |= unit.moments_layout()
    world_size = dist.get_world_size(here)
    unshared = world_size * _device_bytes(units, setup, world_size)
    timeout_s = timeout_of(here).total_seconds()
    memory = NodeMemory.create(here, layout, len(units), timeout_s, unshared)
    for unit in units:
        unit.map(memory)
    buffers.map(memory)
    return memory


def _device_bytes(units: Sequence[SlideUnit], setup: EngineSetup, world_size: int) -> int:
    """Return the host memory that a rank needs as its device, at least: without activations."""
    if setup.device.type != "cpu":
        return 0
    full, itemsize = setup.strategy, units[0].precision.compute.itemsize
    root, *others = [unit.whole for unit in units]
    trained_root, *trained = [unit.size for unit in units]
    return window_bytes(full, itemsize, root, others) + offload_bytes(
        full, itemsize, trained_root, [*filter(None, trained)], world_size
    )


def moments_in_memory(units: Sequence[SlideUnit], memory: NodeMemory) -> MomentStore:
    """Return moments in memory that was shared for them, too."""
    for unit in units:
        unit.map_moments(memory)
    return MomentStore(
        {unit.name: Moments(*(unit.vectors[kind][unit.own] for kind in KINDS)) for unit in units}
    )


def moments_on_disk(
    units: Sequence[SlideUnit], here: dist.ProcessGroup, folder: Path
) -> MomentStore:
    """Return moments in a file that the ranks of a node create together.

    Raises:
        UserError: (on all ranks) it cannot be created in the folder, or not that large.
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


def store_model(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    units: Sequence[SlideUnit],
    buffers: GradBuffers,
    setup: EngineSetup,
    copies: Copies,
) -> None:
    """Move the weights to host memory, materialising one unit at a time, and page-lock it.

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
        unit.unbind(setup.device)  # before the next unit has weights
        copies.pin(unit.source if whole else unit.own_source)
    for vector in buffers.own():
        copies.pin(vector)


def make_optimizer(
    setup: EngineSetup,
    context: NodeContext,
    module: SlideModule,
    moments: MomentStore,
    order: Sequence[SlideUnit],
) -> HostOptimizer:
    """Return the optimizer in host memory.

    Args:
        module: with its collectives attached.
        order: of updates, see `HostOptimizer`.
    """
    reduce = None if setup.strategy.grad_sync == "gpu_reduce" else module.reduce
    reduction = GradReduction(context, keeping_of(setup), reduce, module.average)
    workers = update_workers(context.groups.here, setup.device)
    return HostOptimizer(context, reduction, workers, moments, order, setup.seed)


def make_schedule(
    setup: EngineSetup,
    context: NodeContext,
    module: SlideModule,
    units: Sequence[SlideUnit],
    buffers: GradBuffers,
    optimizer: HostOptimizer,
) -> Schedule:
    """Return what moves the units, the root and others."""
    (root, *others), strategy, device = units, setup.strategy, setup.device
    precision = root.precision
    reduce = module.reduce if strategy.grad_sync == "gpu_reduce" else None
    largest = max(unit.whole for unit in others)
    return Schedule(
        root,
        others,
        torch.empty(root.whole, dtype=precision.compute, device=device),
        Window(window_slots(strategy, len(others)), largest, precision.compute, device),
        Prefetcher(context, module.gather),
        GradOffload(context, buffers, optimizer.receive, reduce, precision.offload, device),
        optimizer,
        holds_updates(setup),
    )
