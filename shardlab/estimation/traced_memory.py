"""The memory of a rank in a training step, traced with tensors that have shapes and no data.

By torch's own trackers (torch/distributed/_tools). FSDPMemTracker takes what DTensor computes on
shapes alone for memory, so a step goes before the one that is traced: by then that is cached.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PretrainedConfig

from shardlab.engines.common.computation import prepare
from shardlab.engines.common.mesh import copies, make_mesh
from shardlab.engines.common.precision import dtype_of
from shardlab.engines.wrapped.fsdp1 import wrap_model
from shardlab.engines.wrapped.fsdp2 import gather_ahead, shard_model
from shardlab.experiment.schema import Train
from shardlab.memory.step import Categories
from shardlab.strategy.strategy import Strategy

_CPU = torch.device("cpu")
_NAMES = {
    "Parameter": "parameters",
    "Sharded Param": "parameters",
    "Unsharded Param": "gathered",
    "All Gather": "gathered",
    "Gradient": "gradients",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "communication",
    "Reduce Scatter": "communication",
    "Optstate": "moments",
    "OptState": "moments",
    "Activation": "activations",
    "Temp": "temporary",
    "Buffer": "buffers",
    "Inputs": "inputs",
}
"""of the trackers' categories; `temporary` is what backward makes beside gradients of parameters"""


class _Wrapped(NamedTuple):
    module: nn.Module
    accumulating: Callable[[], AbstractContextManager[None]]
    """while backward passes are not the last ones of their step"""


@contextmanager
def imagined_ranks(count: int) -> Iterator[dist.ProcessGroup]:
    """While the block runs, this process is rank 0 of so many, of which there are no others."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


def traced_memory(
    config: PretrainedConfig, strategy: Strategy, train: Train, group: dist.ProcessGroup
) -> Categories | None:
    """What is alive at the peak of a step on a CPU; without what codecs keep and need.

    The gradients of `ddp` stay between steps, as they do in its buckets.

    Args:
        group: of `imagined_ranks`.

    Returns:
        None for what no tracker follows: the threads of `manual` and `slide`, parts of parameters
        (`use_orig_params`), off-load and activations that leave the device.
    """
    full = strategy.canonical().model_copy(update={"compile": False})
    elsewhere = full.offload or full.activations != "device"
    if full.engine in ("manual", "slide") or full.use_orig_params or elsewhere:
        return None
    replicas = copies(full, group) if full.engine == "fsdp2" else full.replicas or 1
    mesh = make_mesh(group, replicas, _CPU)  # holds numbers, which have to be there
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        prepare(model, full)
        wrapped = _wrap(model, full, mesh)
        optimizer = torch.optim.AdamW(wrapped.module.parameters(), fused=True)
        step = partial(_step, wrapped, optimizer, full, train, config.vocab_size)
        step(lambda: None)
        tracker = _tracker(wrapped.module, optimizer)
        with tracker:
            step(tracker.reset_mod_stats)
    return _categories(tracker)


def _wrap(model: nn.Module, full: Strategy, mesh: DeviceMesh) -> _Wrapped:
    def filled(module: nn.Module) -> None:
        """Shapes have no values."""

    if full.engine == "ddp":
        return _Wrapped(model, nullcontext)
    if full.engine == "fsdp1":
        wrapped = wrap_model(model, full, mesh, _CPU, filled)
        return _Wrapped(wrapped, nullcontext if full.reduce_every_micro_batch else wrapped.no_sync)
    units, root = shard_model(model, full, mesh, _CPU, filled)
    gather_ahead(root, units, *full.depths())

    @contextmanager
    def accumulating() -> Iterator[None]:
        root.set_requires_gradient_sync(full.reduce_every_micro_batch)
        yield
        root.set_requires_gradient_sync(True)

    return _Wrapped(model, accumulating)


def _step(
    wrapped: _Wrapped,
    optimizer: torch.optim.Optimizer,
    full: Strategy,
    train: Train,
    vocabulary: int,
    between: Callable[[], None],
) -> None:
    """One step as the engines do it, with a call after each micro-batch."""
    count = full.accumulation or train.accumulation
    samples = train.batch_size * train.accumulation // count
    tokens = torch.randint(vocabulary, (samples, train.sequence_length + 1))
    for number in range(1, count + 1):
        with nullcontext() if number == count else wrapped.accumulating():
            _forward_backward(wrapped.module, tokens, full)
        between()
    optimizer.step()
    optimizer.zero_grad(set_to_none=full.engine != "ddp")


def _forward_backward(module: nn.Module, tokens: torch.Tensor, full: Strategy) -> None:
    dtype = dtype_of(full.param_dtype, _CPU)
    narrow = full.engine == "ddp" and dtype is not torch.float32
    with torch.autocast("cpu", dtype, enabled=narrow):
        logits = module(input_ids=tokens[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()


def _tracker(module: nn.Module, optimizer: torch.optim.Optimizer) -> MemTracker:
    if hasattr(module, "set_requires_gradient_sync"):
        return FSDPMemTracker(module, optimizer)
    tracker = MemTracker()
    tracker.track_external(module, optimizer)
    return tracker


def _categories(tracker: MemTracker) -> Categories:
    """At the peak; the trackers' own total is their sum."""
    found: Categories = {}
    for kinds in tracker.get_tracker_snapshot("peak").values():
        for kind, size in kinds.items():
            name = _NAMES.get(getattr(kind, "value", kind))
            if name is not None and size:
                found[name] = found.get(name, 0) + size
    return found
