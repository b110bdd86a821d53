"""Puts collectives into FSDP2 (`torch.distributed.fsdp.fully_shard`) models.

FSDP2 has no communication hooks; its extension point is a custom `ReduceScatter` and `AllGather`
per module (torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_api.py`). Neither is told whose
values it moves, so every unit gets its own, made from the parameters of its group.

With two-dimensional meshes (HSDP) FSDP2 itself calls `dist.all_reduce` on what the reduce-scatter
gave, over the group of the replicas, and then an all-reduce hook (`foreach_reduce` in
`_fsdp_collectives.py`). That call cannot be taken out, but its group can be exchanged: we give it
one of this rank alone, over which nothing is summed, and the hook sums over the replicas. So FSDP2
keeps deciding when (`set_requires_all_reduce`), and by its own rules leaves the division by the
number of replicas, which it does not see, to the hook.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardlab.codecs.unit import Unit
from shardlab.comm.collective import Collective, MakeCollective
from shardlab.comm.fsdp2_units import block_of, replicated, units_of
from shardlab.comm.hierarchy import subgroup
from shardlab.comm.names import plain
from shardlab.core.errors import UserError
from shardlab.transport.background import Lanes


def attach_fsdp2(
    model: nn.Module,
    gradients: MakeCollective,
    weights: MakeCollective,
    replicas: MakeCollective,
    lanes: Lanes | None = None,
) -> Callable[[], None]:
    """Gives every unit of `model` our collectives; returns a function that takes them out.

    Args:
        replicas: of gradients, between the replicas of a two-dimensional mesh.
        lanes: the collectives run there, beside computation.

    Raises:
        UserError: a unit has several groups of parameters.
    """
    units = units_of(model)
    if lanes is not None:
        _overlap(units, True)
    names = {module: plain(name) for name, module in model.named_modules()}
    undo = []
    for name, module, group in units:
        # made here, so that what does not fit is said by `attach` and not in a backward pass
        gradients(group._reduce_scatter_process_group)
        weights(group._all_gather_process_group)
        undo.append((module, group._reduce_scatter_comm, group._all_gather_comm))
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        sent = Unit(name, tuple(block_of(p, names, group) for p in trained))
        gathered = Unit(name, tuple(block_of(p, names, group) for p in group.fsdp_params))
        module.set_custom_reduce_scatter(_ReduceScatterHook(gradients, sent, group, lanes))
        module.set_custom_all_gather(_AllGatherHook(weights, gathered, lanes))
    taken = _take_all_reduces(model, names, replicas)

    def detach() -> None:
        for module, reduce_scatter, all_gather in undo:
            module.set_custom_reduce_scatter(reduce_scatter)
            module.set_custom_all_gather(all_gather)
        for group, mesh_info, hook in taken:
            group.mesh_info, group._all_reduce_hook = mesh_info, hook
        if lanes is not None:
            _overlap(units, False)

    return detach


def _overlap(units: list[tuple[str, FSDPModule, FSDPParamGroup]], on: bool) -> None:
    """Gathers and reductions get a process group each, and gathers may be under way."""
    for _, module, _ in units:
        module.set_separate_reduce_scatter_group(on, recurse=False)
        module._set_unshard_async_op(on)


def _take_all_reduces(
    model: nn.Module, names: dict[nn.Module, str], replicas: MakeCollective
) -> list[tuple[FSDPParamGroup, DDPMeshInfo, Callable[[Tensor], None] | None]]:
    """The all-reduces between replicas go through ours; returns what there was before."""
    before = []
    alone: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for name, _, group in units_of(model):
        info = group.mesh_info
        if not isinstance(info, DDPMeshInfo):
            continue
        between = info.replicate_process_group
        if between not in alone:
            alone[between] = subgroup(between, [dist.get_rank()])
        before.append((group, info, group._all_reduce_hook))
        group.mesh_info = copy.copy(info)
        group.mesh_info.replicate_process_group = alone[between]
        group._all_reduce_hook = _AllReduceHook(
            replicas(between), replicated(name, names, group), group, group._all_reduce_hook
        )
    return before


class _Allocate:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatterHook(_Allocate, ReduceScatter):
    def __init__(
        self, make: MakeCollective, unit: Unit, group: FSDPParamGroup, lanes: Lanes | None
    ) -> None:
        self._make = make
        self._unit = unit
        self._group = group
        self._lanes = lanes

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        arguments = output_tensor, input_tensor, _scale(op, dist.get_world_size(group)), self._unit
        collective = self._make(group)
        if self._lanes is None:
            collective.reduce_scatter(*arguments)
            return
        running = self._lanes.reductions.start(collective.reduce_scatter, *arguments)
        if op != dist.ReduceOp.AVG or self._is_read_at_once(output_tensor):
            running.wait()

    def _is_read_at_once(self, gradient: Tensor) -> bool:
        """Whether FSDP2 does more with the sum than to store it (`foreach_reduce`)."""
        group = self._group
        return (
            gradient.dtype != group._orig_dtype
            or group._all_reduce_hook is not None
            or isinstance(group.mesh_info, DDPMeshInfo)
            or any(
                p.sharded_param.grad is not None or p.sharded_param._post_accumulate_grad_hooks
                for p in group.fsdp_params
            )
        )


class _AllGatherHook(_Allocate, AllGather):
    """`input_tensor` is the own part of `output_tensor`: a codec reads it before it writes."""

    def __init__(self, make: MakeCollective, unit: Unit, lanes: Lanes | None) -> None:
        self._make = make
        self._unit = unit
        self._lanes = lanes

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        collective, arguments = self._make(group), (output_tensor, input_tensor, self._unit)
        work: dist.Work
        if self._lanes is not None:
            work = self._lanes.gathers.start(collective.all_gather, *arguments)
        else:
            work = collective.start_all_gather(*arguments)
        if async_op:
            return work
        work.wait()
        return None


class _AllReduceHook:
    """Sums over replicas what FSDP2 took for the whole sum."""

    def __init__(
        self,
        collective: Collective,
        unit: Unit,
        group: FSDPParamGroup,
        then: Callable[[Tensor], None] | None,
    ) -> None:
        self._collective = collective
        self._unit = unit
        self._group = group
        self._then = then

    def __call__(self, gradient: Tensor) -> None:
        # a factor of the user's is the whole division, and FSDP2 has done it
        whole = self._group.gradient_divide_factor is not None
        scale = 1.0 if whole else 1 / self._collective.world_size
        self._collective.all_reduce(gradient, scale, self._unit)
        if gradient.is_cuda:
            # FSDP2 may free it before the all-reduce stream, on which this ran, is done with it
            gradient.record_stream(torch.cuda.current_stream())
        if self._then is not None:
            self._then(gradient)


def _scale(op: Any, world_size: int) -> float:
    if op == dist.ReduceOp.AVG:
        return 1 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    raise UserError(
        f"fsdp2: reduction {op} cannot be compressed: call set_force_sum_reduction_for_comms(True) "
        "beside set_gradient_divide_factor"
    )
