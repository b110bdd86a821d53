"""Format `sharded`: every rank writes its part, and any number of ranks reads what it needs.

Uses torch.distributed.checkpoint with its safetensors storage: FileSystemWriter would pickle its
metadata.
"""

import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardlab.core.errors import UserError
from shardlab.engines.common.base import State

_FOLDER = "sharded"


def copy(shards: State) -> State:
    """Return a copy in host memory, which training does not modify."""
    return {
        kind: {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        for kind, tensors in shards.items()
    }


def write(folder: Path, shards: State, group: dist.ProcessGroup) -> None:
    """Write the shards of all ranks into the folder of a checkpoint; replicated tensors once.

    Args:
        group: of all ranks, which nothing else may use concurrently.
    """
    storage = HuggingFaceStorageWriter(str(folder / _FOLDER), save_distributed=True)
    dcp.save(dict(shards), storage_writer=storage, process_group=group)


def load(folder: Path, shards: State) -> None:
    """Fill `shards` in place, without communication.

    Raises:
        UserError: the checkpoint has other units.
    """
    storage = HuggingFaceStorageReader(str(folder / _FOLDER))
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
