"""Puts collectives into FSDP2 (`torch.distributed.fsdp.fully_shard`) models.

FSDP2 has no communication hooks; its extension point is a custom `ReduceScatter` and `AllGather`
per module (torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_api.py`). Neither is told whose
values it moves, so every unit gets its own, made from the parameters of its group.

With two-dimensional meshes (HSDP) the reduce-scatter inside a replica is ours, the all-reduce
between replicas remains FSDP's: it is reported, neither compressed nor counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.collective import Collective, Native
from shardlab.comm.names import plain
from shardlab.core.errors import UserError

MakeCollective = Callable[[dist.ProcessGroup], Collective]


def attach_fsdp2(
    model: nn.Module, gradients: MakeCollective, weights: MakeCollective
) -> Callable[[], None]:
    """Gives every unit of `model` our collectives; returns a function that takes them out.

    Raises:
        UserError: a unit has several groups of parameters.
    """
    names = {module: plain(name) for name, module in model.named_modules()}
    undo = []
    for name, module, group in _units(model):
        # made here, so that what does not fit is said by `attach` and not in a backward pass
        gradients(group._reduce_scatter_process_group)
        weights(group._all_gather_process_group)
        undo.append((module, group._reduce_scatter_comm, group._all_gather_comm))
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        sent = Unit(name, tuple(_block(p, names, group) for p in trained))
        gathered = Unit(name, tuple(_block(p, names, group) for p in group.fsdp_params))
        module.set_custom_reduce_scatter(_ReduceScatterHook(gradients, sent, group._is_hsdp))
        module.set_custom_all_gather(_AllGatherHook(weights, gathered))

    def detach() -> None:
        for module, reduce_scatter, all_gather in undo:
            module.set_custom_reduce_scatter(reduce_scatter)
            module.set_custom_all_gather(all_gather)

    return detach


def _units(model: nn.Module) -> list[tuple[str, FSDPModule, FSDPParamGroup]]:
    """Every unit's name, module and group of parameters; modules of one unit count once."""
    found: dict[int, tuple[str, FSDPModule, FSDPParamGroup]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = module._get_fsdp_state()._fsdp_param_groups
        if len(groups) > 1 or not all(isinstance(g.mesh_info, FSDPMeshInfo) for g in groups):
            raise UserError(
                f"fsdp2: {plain(name) or 'root'!r} does not shard its parameters over one mesh, "
                "and torch takes no custom collectives for that: shard it by fully_shard alone"
            )
        for group in groups:
            found.setdefault(id(group), (plain(name) or "root", module, group))
    return list(found.values())


def _block(parameter: FSDPParam, names: dict[nn.Module, str], group: FSDPParamGroup) -> Block:
    """Rows are what is cut into chunks: of another dimension than the first, every rank's cut."""
    info = parameter._module_info
    size = parameter._orig_size
    cut = parameter.fsdp_placement.dim
    rows = size[0] * (group._reduce_scatter_process_group.size() if cut else 1)
    name = ".".join(filter(None, [names[info.module], info.param_name]))
    return Block(name, rows, size.numel() // rows)


class _Allocate:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatterHook(_Allocate, ReduceScatter):
    def __init__(self, make: MakeCollective, unit: Unit, replicated: bool) -> None:
        self._make = make
        self._unit = unit
        self._replicated = replicated

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        scale = _scale(op, dist.get_world_size(group))
        collective = self._make(group)
        if self._replicated:
            collective.account.uncompressed["all-reduce between replicas"] += 1
        collective.reduce_scatter(output_tensor, input_tensor, scale, self._unit)


class _AllGatherHook(_Allocate, AllGather):
    """`input_tensor` is the own part of `output_tensor`: a codec reads it before it writes."""

    def __init__(self, make: MakeCollective, unit: Unit) -> None:
        self._make = make
        self._unit = unit

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        collective = self._make(group)
        if isinstance(collective, Native):
            work = collective.start_all_gather(output_tensor, input_tensor)
            if async_op:
                return work
            work.wait()
        else:
            collective.all_gather(output_tensor, input_tensor, self._unit)
        return None


def _scale(op: Any, world_size: int) -> float:
    if op == dist.ReduceOp.AVG:
        return 1 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    raise UserError(
        f"fsdp2: reduction {op} cannot be compressed: call set_force_sum_reduction_for_comms(True) "
        "beside set_gradient_divide_factor"
    )
