"""Format `full`: whole tensors by the names of the unwrapped model, for any engine."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from shardlab.checkpoint.state_files import in_host_memory, save_state, save_tensors
from shardlab.engines.common.base import Engine, State

_MODEL, _OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def gather(engine: Engine, writer: bool) -> State:
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


def write(folder: Path, whole: State) -> None:
    """Write the result of `gather` into the folder of a checkpoint."""
    moments = {kind: tensors for kind, tensors in whole.items() if kind != "parameter"}
    save_tensors(folder / _MODEL, whole["parameter"])
    save_state(folder / _OPTIMIZER, moments)


def load(engine: Engine, folder: Path) -> None:
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
                _take(tensor, whole)


def _take(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole`, which every rank has: without communication."""
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    tensor.copy_(whole)
