"""Collectives of FSDP2 (`torch.distributed.fsdp.fully_shard`) models, unit by unit.

FSDP2 has no communication hooks; its extension point is a custom `ReduceScatter` and `AllGather`
per module (torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_api.py`). Their arguments do not
name the parameters, so every unit has its own, made from the parameters of its group.

With two-dimensional meshes (HSDP) FSDP2 itself calls `dist.all_reduce` on the result of the
reduce-scatter, over the group of the replicas, and then an all-reduce hook (`foreach_reduce` in
`_fsdp_collectives.py`). That call cannot be removed, but its group can be replaced: by one of this
rank alone, over which nothing is summed, and the hook sums over the replicas. FSDP2 still decides
when (`set_requires_all_reduce`). It does not see the number of replicas, so the hook divides by it.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardlab.codecs.base import Block, Unit
from shardlab.comm.background import Lanes
from shardlab.comm.collective import REPLICAS, Collective
from shardlab.comm.object_collectives import release, subgroup
from shardlab.comm.routes import Collectives
from shardlab.comm.uncompressed import Native
from shardlab.core import torch_private
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.core.torch_private import DDPMeshInfo, FSDPMeshInfo, FSDPParamGroup
from shardlab.models.names import plain

_UnitGroup = tuple[str, FSDPModule, FSDPParamGroup]
"""name, module and parameters of a unit"""


def attach_fsdp2(
    model: nn.Module, collectives: Collectives, lanes: Lanes | None = None
) -> Callable[[], None]:
    """Use these collectives for every unit of `model`; return a function that restores torch's.

    Args:
        lanes: threads in which the collectives run concurrently with computation.

    Raises:
        UserError: a unit has several groups of parameters, or is attached already. At the first
            forward pass: `fully_shard` has made more units since.
    """
    units = _units_of(model)
    for name, _, group in units:
        if isinstance(torch_private.collectives(group)[0], _ReduceScatterHook):
            raise UserError(
                f"fsdp2: {name!r} is attached already: call detach() of that handle first"
            )
    coverage = _Coverage(model, {id(group) for _, _, group in units})
    if lanes is not None:
        _overlap(units, True)
    names = {module: plain(name) for name, module in model.named_modules()}
    undo = []
    for name, module, group in units:
        reduce = collectives.gradients(torch_private.shard_group(group))
        # made now, so that a saved state finds them; backward may gather within smaller groups
        if isinstance(group.post_forward_mesh_info, FSDPMeshInfo):
            collectives.weights(group.post_forward_mesh_info.shard_process_group)
        gather = collectives.weights(torch_private.shard_group(group))
        undo.append((module, *torch_private.collectives(group)))
        sent = _TrainedUnit(name, group, tuple(_blocks(group, names)))
        gathered = Unit(name, sent.blocks)
        noted = partial(gather.note_pass, gathered, True)
        module.set_custom_reduce_scatter(_ReduceScatterHook(reduce, sent, group, lanes, noted))
        hook = _AllGatherHook(collectives.weights, gathered, lanes, coverage)
        module.set_custom_all_gather(hook)
    replaced = _replace_all_reduces(units, names, collectives)

    def detach() -> None:
        for module, reduce_scatter, all_gather in undo:
            module.set_custom_reduce_scatter(reduce_scatter)
            module.set_custom_all_gather(all_gather)
        infos = [group.mesh_info for _, group, _, _ in replaced]
        alone = {info.replicate_process_group for info in infos if isinstance(info, DDPMeshInfo)}
        for module, group, mesh_info, hook in replaced:
            group.mesh_info = mesh_info
            module.set_all_reduce_hook(hook)  # type: ignore[arg-type] # None is no hook
        release(alone)
        if lanes is not None:
            _overlap(units, False)

    return detach


def unit_names(model: nn.Module) -> list[str]:
    """Return the name of each unit."""
    return [name for name, _, _ in _units_of(model)]


def replica_group(
    model: nn.Module, replicas: dist.ProcessGroup | None, warmup_steps: int
) -> dist.ProcessGroup:
    """Return the ranks that hold the same shards of other replicas.

    Args:
        replicas: those of a model that is sharded over one dimension.
        warmup_steps: steps in which gradients are reduced between them.

    Raises:
        UserError: there are no replicas, or gradients cannot be reduced between them.
    """
    infos = [group.mesh_info for _, _, group in _units_of(model)]
    between = {i.replicate_process_group for i in infos if isinstance(i, DDPMeshInfo)}
    if not between and replicas is not None and not warmup_steps:
        return replicas
    if len(between) == 1 and replicas is None:
        return between.pop()
    if replicas is not None and not between:
        raise UserError(
            "attach: sync: warmup_steps reduces gradients between replicas, which needs a mesh of "
            "two dimensions, the replicas first: fully_shard over that, without replicas"
        )
    raise UserError(
        "attach: sync needs replicas: fully_shard(..., mesh=init_device_mesh(TYPE, "
        "(REPLICAS, SHARDS), mesh_dim_names=('replicas', 'shards'))), as (2, 1) of 2 ranks, on all "
        "modules, or a mesh inside the replica with replicas=GROUP"
    )


def _units_of(model: nn.Module) -> list[_UnitGroup]:
    """Return every unit's name, module and group of parameters; modules of one unit count once."""
    units: dict[int, _UnitGroup] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = torch_private.parameter_groups(module)
        if len(groups) > 1 or not all(isinstance(g.mesh_info, FSDPMeshInfo) for g in groups):
            raise UserError(
                f"fsdp2: {plain(name) or 'root'!r} does not shard its parameters over one mesh, "
                "and torch takes no custom collectives for that: shard it by fully_shard alone"
            )
        for group in groups:
            units.setdefault(id(group), (plain(name) or "root", module, group))
    return list(units.values())


def _blocks(group: FSDPParamGroup, names: dict[nn.Module, str]) -> Iterator[Block]:
    """Yield the block of each parameter of a unit, whose rows are cut into chunks.

    A parameter that is sharded along another dimension than the first has the rows of every rank's
    shard, one after another.
    """
    for parameter in group.fsdp_params:
        module, inside, size = torch_private.origin(parameter)
        ranks = torch_private.shard_group(group).size()
        rows = size[0] * (ranks if parameter.fsdp_placement.dim else 1)
        name = ".".join(filter(None, [names[module], inside]))
        yield Block(name, rows, size.numel() // max(rows, 1))


class _Coverage:
    """Check that `fully_shard` made no units after the hooks were set, which they would lack."""

    def __init__(self, model: nn.Module, attached: set[int]) -> None:
        self._model = model
        self._attached = attached
        self._is_checked = False

    def check(self) -> None:
        """At the first message, raise `UserError` where there are other units."""
        if self._is_checked:
            return
        late = [
            name for name, _, group in _units_of(self._model) if id(group) not in self._attached
        ]
        if late:
            raise UserError(
                f"fsdp2: {', '.join(late)}: sharded after attach: call attach after the last "
                "fully_shard"
            )
        self._is_checked = True


class _TrainedUnit:
    """Unit of the parameters that are trained when a message is sent.

    Users freeze and unfreeze parameters between steps. Residuals belong to the name of a unit, so
    each part of the parameters that is trained has a name of its own.

    Args:
        blocks: of all parameters of the group, in its order.
        suffix: of the name.
    """

    def __init__(
        self, name: str, group: FSDPParamGroup, blocks: tuple[Block, ...], suffix: str = ""
    ) -> None:
        self.blocks = blocks
        self._name, self._suffix = name, suffix
        self._group = group
        self._units: dict[tuple[bool, ...], Unit] = {}

    def now(self) -> Unit:
        """Return the unit of this step."""
        trained = tuple(p.sharded_param.requires_grad for p in self._group.fsdp_params)
        if trained not in self._units:
            blocks = tuple(b for b, is_in in zip(self.blocks, trained, strict=True) if is_in)
            part = ""
            if len(blocks) < len(self.blocks):
                names = "\0".join(block.name for block in blocks)
                part = f"#{hashlib.blake2b(names.encode(), digest_size=4).hexdigest()}"
            self._units[trained] = Unit(self._name + part + self._suffix, blocks)
        return self._units[trained]


def _overlap(units: Sequence[_UnitGroup], on: bool) -> None:
    for _, module, _ in units:
        # lanes run concurrently, and the collectives of one process group need one order
        module.set_separate_reduce_scatter_group(on, recurse=False)
        torch_private.gather_asynchronously(module, on)


def _replace_all_reduces(
    units: Sequence[_UnitGroup], names: dict[nn.Module, str], collectives: Collectives
) -> list[tuple[FSDPModule, FSDPParamGroup, DDPMeshInfo, Callable[[Tensor], None] | None]]:
    """Replace the all-reduces between replicas; return the former groups and hooks."""
    before = []
    alone: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for name, module, group in units:
        info = group.mesh_info
        if not isinstance(info, DDPMeshInfo):
            continue
        between = info.replicate_process_group
        if between not in alone:
            alone[between] = subgroup(between, [dist.get_rank()])
        hook = torch_private.all_reduce_hook(group)
        before.append((module, group, info, hook))
        # a copy, since units share the object
        group.mesh_info = copy.copy(info)
        group.mesh_info.replicate_process_group = alone[between]
        # one rank's part of a unit: its rows of every block
        ranks = torch_private.shard_group(group).size()
        parts = (Block(b.name, -(-b.rows // ranks), b.columns) for b in _blocks(group, names))
        unit = _TrainedUnit(name, group, tuple(parts), REPLICAS)
        module.set_all_reduce_hook(_AllReduceHook(collectives.replicas(between), unit, group, hook))
    return before


class _Allocate:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(eq=False)
class _ReduceScatterHook(_Allocate, torch_private.ReduceScatter):
    _collective: Collective
    _unit: _TrainedUnit
    _group: FSDPParamGroup
    _lanes: Lanes | None
    _note_backward: Callable[[], None]
    """since a unit that stays gathered after forward is not gathered in backward"""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._note_backward()
        collective = self._collective
        scale, unit = _scale(op, collective.world_size), self._unit.now()
        if self._lanes is None:
            collective.reduce_scatter(output_tensor, input_tensor, scale, unit)
            return
        running = self._lanes.reductions.start(
            collective.reduce_scatter, output_tensor, input_tensor, scale, unit
        )
        torch_private.call_after_backward(self._lanes.wait)
        # FSDP2 scales and converts the sum on this thread, which must not overtake the reduction
        if op != dist.ReduceOp.AVG or self._is_read_at_once(output_tensor):
            running.wait()

    def _is_read_at_once(self, gradient: Tensor) -> bool:
        """Return whether FSDP2 reads the sum after this call returns (`foreach_reduce`)."""
        group = self._group
        return (
            gradient.dtype != torch_private.original_dtype(group)
            or torch_private.all_reduce_hook(group) is not None
            or isinstance(group.mesh_info, DDPMeshInfo)
            or any(
                p.grad is not None or torch_private.has_accumulation_hooks(p)
                for p in (parameter.sharded_param for parameter in group.fsdp_params)
            )
        )


@dataclass(eq=False)
class _AllGatherHook(_Allocate, torch_private.AllGather):
    """All-gather of a unit; `input_tensor` is the part of this rank in `output_tensor`."""

    _make: Callable[[dist.ProcessGroup], Collective]
    """for the group of the gather, which may be a part of the ranks in backward"""
    _unit: Unit
    _lanes: Lanes | None
    _coverage: _Coverage

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._coverage.check()
        collective, arguments = self._make(group), (output_tensor, input_tensor, self._unit)
        # on this thread: lanes have others
        collective.note_pass(self._unit, torch_private.in_backward())
        if self._lanes is not None:
            running = self._lanes.gathers.start(collective.all_gather, *arguments)
            if async_op:
                return running
            running.wait()
        elif async_op and isinstance(collective, Native):
            return collective.start_all_gather(*arguments)
        else:
            # on this stream, as FSDP2 expects: NCCL runs asynchronous operations on one of its own
            collective.all_gather(*arguments)
        return None


@dataclass(eq=False)
class _AllReduceHook:
    """Sum over replicas of the result of a reduce-scatter."""

    _collective: Collective
    _unit: _TrainedUnit
    _group: FSDPParamGroup
    _then: Callable[[Tensor], None] | None

    def __call__(self, gradient: Tensor) -> None:
        # FSDP2 has already divided by a factor that the user set, in place of all ranks
        divided = self._group.gradient_divide_factor is not None
        scale = 1.0 if divided else 1 / self._collective.world_size
        self._collective.all_reduce(gradient, scale, self._unit.now())
        if (accelerator := accelerator_of(gradient.device)) is not None:
            # FSDP2 may free it before the all-reduce stream, on which this runs, has used it
            gradient.record_stream(accelerator.current_stream())
        if self._then is not None:
            self._then(gradient)


def _scale(op: Any, world_size: int) -> float:
    if op == dist.ReduceOp.AVG:
        return 1 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    raise UserError(
        "fsdp2: sums that are multiplied beforehand (PREMUL_SUM) cannot be compressed: call "
        "set_force_sum_reduction_for_comms(True) with set_gradient_divide_factor"
    )
