"""Puts collectives into FSDP2 (`torch.distributed.fsdp.fully_shard`) models.

FSDP2 has no communication hooks; its extension point is a custom `ReduceScatter` and `AllGather`
per module (torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_api.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from shardlab.codecs.unit import Unit
from shardlab.comm.collective import Collective, Native
from shardlab.core.errors import UserError

MakeCollective = Callable[[dist.ProcessGroup], Collective]


def attach_fsdp2(
    model: FSDPModule, gradients: MakeCollective, weights: Callable[[dist.ProcessGroup], Native]
) -> Callable[[], None]:
    """Gives every unit of `model` our collectives; returns a function that takes them out."""
    modules = cast(nn.Module, model)  # fully_shard mixes FSDPModule into the class of a module
    units = [(name, m) for name, m in modules.named_modules() if isinstance(m, FSDPModule)]
    for name, unit in units:
        unit.set_custom_reduce_scatter(_ReduceScatterHook(gradients, name or "root"))
        unit.set_custom_all_gather(_AllGatherHook(weights))

    def detach() -> None:
        for _, unit in units:
            unit.set_custom_reduce_scatter(DefaultReduceScatter())
            unit.set_custom_all_gather(DefaultAllGather())

    return detach


class _Allocate:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatterHook(_Allocate, ReduceScatter):
    """One per unit, since FSDP2 does not say whose gradients it hands over."""

    def __init__(self, make: MakeCollective, unit: str) -> None:
        self._make = make
        self._unit = Unit(unit)

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
        collective.reduce_scatter(output_tensor, input_tensor, scale, self._unit)


class _AllGatherHook(_Allocate, AllGather):
    def __init__(self, make: Callable[[dist.ProcessGroup], Native]) -> None:
        self._make = make

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = self._make(group).start_all_gather(output_tensor, input_tensor)
        if async_op:
            return work
        work.wait()
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
