"""Formats of parameters and moments in a checkpoint: `full` and `sharded`.

`full` holds whole tensors by the names of the unwrapped model, for any engine. In `sharded` every
rank writes its part, and any number of ranks reads what it needs: torch.distributed.checkpoint with
its safetensors storage, since FileSystemWriter would pickle its metadata.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from shardlab.core.errors import UserError
from shardlab.engines.base import Engine, State
from shardlab.engines.state_files import in_host_memory, save_state, save_tensors

_MODEL, _OPTIMIZER, _SHARDED = "model.safetensors", "optimizer.safetensors", "sharded"


def gather_full(engine: Engine, writer: bool) -> State:
    """Gather the parameters and moments of all ranks on the writer.

    The others hold one whole entry of `Engine.shards()` at a time, and return nothing.
    """
    whole: State = {}
    for kind, tensors in engine.shards().items():
        for entry, tensor in tensors.items():
            parts = engine.gather(entry, tensor)
            if writer:
                whole.setdefault(kind, {}).update(in_host_memory(parts))
    return whole


def write_full(folder: Path, whole: State) -> None:
    """Write the result of `gather_full` into the folder of a checkpoint."""
    moments = {kind: tensors for kind, tensors in whole.items() if kind != "parameter"}
    save_tensors(folder / _MODEL, whole["parameter"])
    save_state(folder / _OPTIMIZER, moments)


def load_full(engine: Engine, folder: Path) -> None:
    """Load the part of every rank, with one whole entry of `Engine.shards()` at a time.

    Values are rounded to nearest in the dtype that the engine keeps.
    """
    with safe_open(folder / _MODEL, "pt") as model, safe_open(folder / _OPTIMIZER, "pt") as moments:
        for kind, tensors in engine.shards().items():
            file, prefix = (model, "") if kind == "parameter" else (moments, f"{kind}.")
            for entry, tensor in tensors.items():
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                for name, part in engine.split(entry, whole).items():
                    part.copy_(file.get_tensor(prefix + name))
                _copy_own_part(tensor, whole)


def _copy_own_part(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole`, which every rank has: without communication."""
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    tensor.copy_(whole)


def write_sharded(folder: Path, shards: State, group: dist.ProcessGroup) -> None:
    """Write the shards of all ranks into the folder of a checkpoint; replicated tensors once.

    Args:
        group: of all ranks, which nothing else may use concurrently.
    """
    storage = HuggingFaceStorageWriter(str(folder / _SHARDED), save_distributed=True)
    dcp.save(dict(shards), storage_writer=storage, process_group=group)


def load_sharded(folder: Path, shards: State) -> None:
    """Fill `shards` in place, without communication.

    Raises:
        UserError: the checkpoint has other units.
    """
    storage = HuggingFaceStorageReader(str(folder / _SHARDED))
    saved = storage.read_metadata().state_dict_metadata
    for kind, tensors in shards.items():
        for name, tensor in tensors.items():
            known = saved.get(f"{kind}.{name}")
            if not isinstance(known, TensorStorageMetadata) or known.size != tensor.shape:
                raise UserError(
                    f"{folder}: holds no {kind} {name!r} of shape {list(tensor.shape)}: a sharded "
                    "checkpoint serves the units that it was made of: go on with the engine and "
                    "wrap that made it, or save with train.checkpoint.format: full"
                )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(dict(shards), storage_reader=storage, no_dist=True)
