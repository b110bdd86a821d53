"""Trace of the memory of a rank in a training step, with tensors that have shapes and no data.

The trackers are torch's (torch/distributed/_tools). FSDPMemTracker counts what DTensor computes
from shapes alone as memory, so that the traced step is the second: by then those are cached.
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

from shardlab.config.schema import Train
from shardlab.config.strategy import CanonicalStrategy, Strategy
from shardlab.engines.flat import make_mesh, mesh_copies
from shardlab.engines.fsdp1 import wrap_model
from shardlab.engines.fsdp2 import gather_ahead, shard_model
from shardlab.models.dtypes import dtype_of
from shardlab.models.memory_sizes import Categories
from shardlab.models.units import prepare

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
"""our names of the trackers' categories; `temporary`: allocated in backward, but no gradient of a
parameter"""


class _Wrapped(NamedTuple):
    module: nn.Module
    accumulating: Callable[[], AbstractContextManager[None]]
    """around micro-batches before the last of a step"""


@contextmanager
def imagined_ranks(count: int) -> Iterator[dist.ProcessGroup]:
    """Make this process rank 0 of `count` ranks that do not exist, while the block runs."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


def traced_memory(
    config: PretrainedConfig, strategy: Strategy, train: Train, group: dist.ProcessGroup
) -> Categories | None:
    """Return the bytes alive at the peak of a step on a CPU, without those of codecs.

    Args:
        group: of `imagined_ranks`.

    Returns:
        None for what no tracker follows: engines with threads of ours, parts of parameters
        (`use_orig_params`), off-load, and activations off the device.
    """
    full = strategy.canonical().model_copy(update={"compile": False})
    elsewhere = full.offload or full.activations != "device"
    if full.engine not in _WRAP or full.use_orig_params or elsewhere:
        return None
    # made outside of FakeTensorMode: a mesh reads the numbers of its ranks
    mesh = make_mesh(group, mesh_copies(full, group), _CPU)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        prepare(model, full)
        wrapped = _WRAP[full.engine](model, full, mesh)
        optimizer = torch.optim.AdamW(wrapped.module.parameters(), fused=True)
        step = partial(_step, wrapped, optimizer, full, train, config.vocab_size)
        step(lambda: None)
        tracker = _tracker(wrapped.module, optimizer)
        with tracker:
            step(tracker.reset_mod_stats)
    return _categories(tracker)


def _no_weights(module: nn.Module) -> None:
    """Leave a module as it is: its tensors have shapes and no data."""


def _ddp(model: nn.Module, full: CanonicalStrategy, mesh: DeviceMesh) -> _Wrapped:
    return _Wrapped(model, nullcontext)


def _fsdp1(model: nn.Module, full: CanonicalStrategy, mesh: DeviceMesh) -> _Wrapped:
    wrapped = wrap_model(model, full, mesh, _CPU, _no_weights)
    return _Wrapped(wrapped, nullcontext if full.reduce_every_micro_batch else wrapped.no_sync)


def _fsdp2(model: nn.Module, full: CanonicalStrategy, mesh: DeviceMesh) -> _Wrapped:
    units, root = shard_model(model, full, mesh, _CPU, _no_weights)
    gather_ahead(root, units, *full.depths())

    @contextmanager
    def accumulating() -> Iterator[None]:
        root.set_requires_gradient_sync(full.reduce_every_micro_batch)
        yield
        root.set_requires_gradient_sync(True)

    return _Wrapped(model, accumulating)


_WRAP: dict[str, Callable[[nn.Module, CanonicalStrategy, DeviceMesh], _Wrapped]] = {
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
}
"""by engine; torch's trackers follow no others"""


def _step(
    wrapped: _Wrapped,
    optimizer: torch.optim.Optimizer,
    full: CanonicalStrategy,
    train: Train,
    vocabulary: int,
    between: Callable[[], None],
) -> None:
    """Run one step as the engines do, with a call after each micro-batch."""
    count = full.accumulation or train.accumulation
    samples = train.batch_size * train.accumulation // count
    tokens = torch.randint(vocabulary, (samples, train.sequence_length + 1))
    for number in range(1, count + 1):
        with nullcontext() if number == count else wrapped.accumulating():
            _forward_backward(wrapped.module, tokens, full)
        between()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not full.traits.gradients_stay)


def _forward_backward(module: nn.Module, tokens: torch.Tensor, full: CanonicalStrategy) -> None:
    dtype = dtype_of(full.param_dtype, _CPU)
    narrow = full.traits.autocast and dtype is not torch.float32
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
    """Return the bytes at the peak; their sum is the total of the trackers."""
    found: Categories = {}
    for kinds in tracker.get_tracker_snapshot("peak").values():
        for kind, size in kinds.items():
            name = _NAMES.get(getattr(kind, "value", kind))
            if name is not None and size:
                found[name] = found.get(name, 0) + size
    return found
