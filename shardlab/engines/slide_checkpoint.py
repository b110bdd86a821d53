"""Checkpoints of `SlideFSDP`: a folder that all ranks write and read together.

slide.json                 the number of ranks, and the checksum of every other file
slide.safetensors          parameters, frozen ones, optimizer states and buffers by the names of the
                           model
rank-00000.safetensors     of each rank: random states, loss scale, residuals and counters of codecs
"""

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from safetensors import safe_open

from shardlab.comm.handle import merge_states
from shardlab.comm.object_collectives import gather_values, run_or_fail_together
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, find_damage, sha256_of_files
from shardlab.engines.base import EngineState
from shardlab.engines.state_files import load_state, save_state

_MANIFEST, _MODEL = "slide.json", "slide.safetensors"


class SlideManifest(Document):
    """Contents of slide.json, the last file that is written."""

    ranks: int
    files: dict[str, str]
    """SHA-256 of the others, by their names"""


def write(
    folder: Path, state: EngineState, rank_state: EngineState, group: dist.ProcessGroup
) -> None:
    """Write the folder atomically, or replace one that was written so; all ranks call together.

    Args:
        state: by kind and name, written by rank 0.
        rank_state: by kind and name, of this rank alone.

    Raises:
        UserError: there is something else, or a rank cannot write; on all ranks.
    """
    failed = f"{folder}: cannot be written: it needs space, and all ranks have to see it"
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with ExitStack() as finishing:

        def begin() -> str | None:
            if rank > 0:
                return None
            if folder.exists() and not (folder / _MANIFEST).is_file():
                raise UserError(f"{folder}: save has not written it: name another folder")
            for path in sorted(folder.glob("*")):
                if path.name not in (_MANIFEST, _MODEL) and not path.match("rank-*.safetensors"):
                    raise UserError(
                        f"{folder}: it holds {path.name}, which save has not written and would "
                        "remove: name another folder"
                    )
            temporary = finishing.enter_context(atomic(folder.resolve()))
            temporary.mkdir()
            return str(temporary)

        def fill() -> None:
            save_state(_rank_file(temporary, rank), rank_state)
            if rank == 0:
                save_state(temporary / _MODEL, state)

        def finish() -> None:
            if rank == 0:
                SlideManifest(ranks=world_size, files=files).to_file(temporary / _MANIFEST)
            finishing.close()

        temporary = Path(gather_values(run_or_fail_together(group, failed, begin), group)[0])
        run_or_fail_together(group, failed, fill)
        share = slice(rank, None, world_size)
        parts = gather_values(
            run_or_fail_together(group, failed, lambda: sha256_of_files(temporary, share)), group
        )
        files = {name: checksum for part in parts for name, checksum in part.items()}
        run_or_fail_together(group, failed, finish)


def read_rank(folder: Path, state: EngineState, rank: int, world_size: int) -> EngineState:
    """Return this rank's own state, of a folder that holds all of a model.

    Each rank compares a part of the checksums. Where the number of ranks has changed, the states of
    codecs are merged, and random states are left out.

    Args:
        state: of the model that will be filled, by kind and name.

    Raises:
        OSError, SafetensorError: the folder cannot be read.
        UserError: it is missing, damaged or of another model, other parameters are frozen, or
            states cannot be merged.
    """
    manifest = SlideManifest.from_file(
        folder / _MANIFEST, "name a folder of SlideFSDP.save that all ranks see"
    )
    if damage := find_damage(folder, manifest.files, slice(rank, None, world_size)):
        name, what = damage
        raise UserError(f"{folder / name}: {what}: load another folder")
    with safe_open(folder / _MODEL, "pt") as file:
        saved = set(file.keys())
        for kind, named in state.items():
            for name, tensor in named.items():
                key = f"{kind}.{name}"
                shape = file.get_slice(key).get_shape() if key in saved else None
                if shape != [*tensor.shape]:
                    raise UserError(
                        f"{folder}: of another model, or one with other frozen parameters: {key} "
                        f"has the shape {shape}, in this one {[*tensor.shape]}: build that model, "
                        "or start from what state_dict() gave"
                    )
    if manifest.ranks == world_size:
        return load_state(_rank_file(folder, rank))
    states = [load_state(_rank_file(folder, number)) for number in range(manifest.ranks)]
    codecs = [own.get("communication", {}) for own in states]
    merged = {"communication": merge_states(codecs, world_size, rank)}
    return merged | {kind: own for kind, own in states[0].items() if kind == "extra"}


def fill(folder: Path, state: EngineState) -> None:
    """Read into tensors by kind and name."""
    with safe_open(folder / _MODEL, "pt") as file:
        for kind, named in state.items():
            for name, tensor in named.items():
                tensor.copy_(file.get_tensor(f"{kind}.{name}"))


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"
