"""Private names of torch that attach, engines and models use, and a check of torch's version.

They have no public counterpart, and another minor version of torch may rename them. The other
modules of the library use public names, and private names that torch's users rely on everywhere
(`extend-ignore-names` in `pyproject.toml`). Importing this module warns of a minor version that is
not in `TRIED`.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from shardlab.core.errors import UserError

TRIED = ("2.11", "2.12", "2.13", "2.14")
"""Minor versions with which the tests of attach and LayerAdam passed; with all but 2.12 also the
tests of the engines. The first is the lowest that `pyproject.toml` allows."""


def check_version(version: str) -> None:
    """Warn of a minor version of torch that is not in `TRIED`, on the first rank of a launcher.

    Raises:
        UserError: The version is older than the first in `TRIED`.
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < tuple(map(int, TRIED[0].split("."))):
        raise UserError(f"torch {version} is too old: pip install 'torch>={TRIED[0]}'")
    if f"{major}.{minor}" not in TRIED and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"shardlab was tried with torch {', '.join(TRIED)}, not with {version}, whose private "
            "names may differ: compare a few steps with those of torch alone, and report in an "
            "issue what you find, with the output of python -m torch.utils.collect_env",
            stacklevel=2,
        )


# before the imports of private modules, which another version may lack
check_version(torch.__version__)

from torch._C._profiler import _ExperimentalConfig
from torch.distributed.fsdp import (
    FlatParameter,
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    _flat_param,
)
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._fully_shard import (
    _fsdp_api,
    _fsdp_common,
    _fsdp_param,
    _fsdp_param_group,
)
from torch.distributed.tensor import DTensor, _utils
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

# FSDP2

AllGather = _fsdp_api.AllGather
"""Base class of arguments of `set_custom_all_gather`."""
ReduceScatter = _fsdp_api.ReduceScatter
"""Base class of arguments of `set_custom_reduce_scatter`."""
FSDPParamGroup = _fsdp_param_group.FSDPParamGroup
"""Parameters that a unit gathers and reduces together; `mesh_info` may be replaced."""
FSDPMeshInfo = _fsdp_common.FSDPMeshInfo
"""Mesh over which a group is sharded."""
DDPMeshInfo = _fsdp_common.DDPMeshInfo
"""Mesh of replicas, over whose process group torch reduces gradients."""


def parameter_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return the parameter groups of a unit."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def shard_group(group: FSDPParamGroup) -> dist.ProcessGroup:
    """Return the process group that reduce-scatters the gradients of a parameter group."""
    return group._reduce_scatter_process_group


def collectives(group: FSDPParamGroup) -> tuple[ReduceScatter, AllGather]:
    """Return the collectives of a group, which `set_custom_reduce_scatter` and
    `set_custom_all_gather` replace."""
    return group._reduce_scatter_comm, group._all_gather_comm


def all_reduce_hook(group: FSDPParamGroup) -> Callable[[Tensor], None] | None:
    """Return the hook of `set_all_reduce_hook`, if there is one."""
    return group._all_reduce_hook


def original_dtype(group: FSDPParamGroup) -> torch.dtype | None:
    """Return the type of the sharded parameters of a group, to which gradients are converted."""
    return group._orig_dtype


def origin(parameter: _fsdp_param.FSDPParam) -> tuple[nn.Module, str, torch.Size]:
    """Return the module of a sharded parameter, its name in the module, and its unsharded size."""
    info = parameter._module_info
    return info.module, info.param_name, parameter._orig_size


def gather_asynchronously(module: FSDPModule, on: bool) -> None:
    """Make the gathers of a unit and of the units in it asynchronous."""
    module._set_unshard_async_op(on)


# autograd


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Return whether `register_post_accumulate_grad_hook` was called."""
    return bool(parameter._post_accumulate_grad_hooks)


def has_step_hooks(optimizer: object) -> bool:
    """Return whether torch has initialized the hooks that an optimizer calls when it steps."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward pass that is running."""
    Variable._execution_engine.queue_callback(function)


# FSDP1

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
"""Strategies that do not support a communication hook."""
FlatParamHandle = _flat_param.FlatParamHandle
"""Object that shards and gathers the flat parameter of a unit."""


def flat_parameter(unit: FullyShardedDataParallel) -> FlatParameter | None:
    """Return the flat parameter of a unit, or None if it has no parameters."""
    return unit._flat_param


def handle_of(unit: FullyShardedDataParallel) -> FlatParamHandle | None:
    """Return the handle of a unit, or None if it has no parameters."""
    return unit._handle


def set_hook_state(unit: FullyShardedDataParallel, state: object) -> None:
    """Set the state that this unit passes to its hook.

    `register_comm_hook` would set one state for all units.
    """
    unit._comm_hook_state = state


def set_gather(handle: FlatParamHandle, gather: Callable[[Tensor], Tensor]) -> None:
    """Replace the gather of parameters by a function that fills a padded tensor and returns it."""
    handle._all_gather_flat_param = gather  # type: ignore[method-assign, assignment]


def restore_fsdp1(unit: FullyShardedDataParallel) -> None:
    """Remove the communication hook of a unit and the function of `set_gather`."""
    unit._comm_hook = None
    unit._comm_hook_state = None
    if unit._handle is not None:
        vars(unit._handle).pop("_all_gather_flat_param", None)


def gather_by_torch(handle: FlatParamHandle, padded: Tensor) -> Tensor:
    """Gather parameters by torch's own function, into a padded tensor."""
    return FlatParamHandle._all_gather_flat_param(handle, padded)


def is_summoned(handle: FlatParamHandle) -> bool:
    """Return whether parameters are gathered for `summon_full_params` or a state dict."""
    return handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS


def is_offloaded(handle: FlatParamHandle) -> bool:
    """Return whether the shard is in host memory outside of computation."""
    return handle._offload_params


def flat_names(flat: FlatParameter) -> Sequence[str]:
    """Return the names of the parameters in the unit."""
    return flat._fqns


def flat_shapes(flat: FlatParameter) -> Sequence[torch.Size]:
    """Return the shapes of the parameters."""
    return flat._shapes


def flat_views(flat: FlatParameter) -> Sequence[Tensor]:
    """Return the original parameters of `use_orig_params`, while they are gathered."""
    return flat._params or ()


def flat_parts(flat: FlatParameter) -> list[tuple[int, bool]]:
    """Return the size of each part in order, and whether the part is padding for alignment."""
    return list(zip(flat._numels_with_padding, flat._is_padding_mask, strict=True))


def flat_numel(flat: FlatParameter) -> int:
    """Return the size of all parts, without the padding of the last shards."""
    return flat._unpadded_unsharded_size.numel()


# DistributedDataParallel

FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES
"""Default limit of the first bucket."""


def reduces_in_python(model: DistributedDataParallel) -> bool:
    """Return whether gradients are sent one by one for compiled autograd, without buckets."""
    return bool(model._use_python_reducer)


def register_comm_hook(
    model: DistributedDataParallel, hook: Callable[[object, dist.GradBucket], Any]
) -> None:
    """Register a communication hook that is not copied with the model.

    torch would pickle and copy a registered hook with the model, although the copy does not call
    it. The hooks of this library refer to process groups, which cannot be pickled or copied.
    """
    model.register_comm_hook(None, hook)
    model._comm_hooks.pop()


def lets_ranks_end(model: DistributedDataParallel) -> bool:
    """Return whether the last `join`, also one that has ended, continues after a rank ends."""
    config = model._join_config
    return bool(config.enable and not config.throw_on_early_termination)


def divides_by_all(model: DistributedDataParallel) -> bool:
    """Return whether the last `join` divides gradients by the number of all ranks."""
    return bool(model._divide_by_initial_world_size)


def assign_buckets(parameters: list[Tensor], limits: list[int]) -> list[list[int]]:
    """Return the indices of the parameters of each bucket, which has one dtype and device.

    Args:
        limits: Limits of the first buckets in bytes; later buckets have the last limit.
    """
    buckets, _ = dist._compute_bucket_assignment_by_size(parameters, limits)
    return buckets


# process groups and DTensor

# torch 2.11 and 2.12 have them by names that later versions deprecate
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of one tensor."""
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduce-scatter of one tensor."""


def backend_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long the backend of a group for a device waits for other ranks."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part, and its offset in each dimension."""
    return _utils.compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


# trees, torch.compile, operators and the profiler

tree_leaves = _pytree.tree_leaves
"""List of the tensors and other values in nested tuples, lists and dicts."""
tree_map = _pytree.tree_map
"""Nested values with a function applied to each."""


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` returned the model, or a module of it is compiled."""
    return hasattr(model, "_orig_mod") or any(m._compiled_call_impl for m in model.modules())


_aten = torch.ops.aten
ATTENTION = [
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""Operators that `torch.nn.functional.scaled_dot_product_attention` calls."""
ProfilerConfig = _ExperimentalConfig
"""Type of `experimental_config` of `torch.profiler.profile`."""
