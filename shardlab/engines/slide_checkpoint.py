"""Checkpoints of `SlideFSDP`: a folder that all ranks write and read together.

slide.json                 the number of ranks, and the checksum of every other file
slide.safetensors          parameters, frozen ones, optimizer states and buffers by the names of the
                           model
rank-00000.safetensors     of each rank: random states; residuals and counters of codecs
"""

import os
from collections.abc import Container
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from shardlab.comm.handle import RESIDUALS, merge_states
from shardlab.comm.object_collectives import gather_values, run_or_fail_together
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, find_damage, sha256_of_files
from shardlab.engines.base import State
from shardlab.engines.slide_memory import FROZEN
from shardlab.engines.state_files import load_state, save_state

_ABOUT, _FILE, _OF_RANKS = "slide.json", "slide.safetensors", "rank-*.safetensors"
_EXTRA = "extra"
_OTHER = {"parameter": FROZEN, FROZEN: "parameter"}
_WITHOUT_RESIDUALS = f"remove {_OF_RANKS} from the folder to begin without what was held back"


class About(Document):
    """Contents of slide.json, the last file that is written."""

    ranks: int
    files: dict[str, str]
    """SHA-256 of the others, by their names"""


def folder_of(folder: Any, call: str) -> Path:
    """Return the folder that a user names.

    Raises:
        UserError: it is no path.
    """
    if not isinstance(folder, str | os.PathLike):
        raise UserError(f"{call}: name a folder, not {folder!r}")
    return Path(folder)


def write(folder: Path, state: State, rank_state: State, group: dist.ProcessGroup) -> None:
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
            _check_replaceable(folder)
            made = finishing.enter_context(atomic(folder.resolve()))
            made.mkdir()
            return str(made)

        def fill() -> None:
            save_state(temporary / _file_of(rank), rank_state)
            if rank == 0:
                save_state(temporary / _FILE, state)

        def finish() -> None:
            if rank == 0:
                About(ranks=world_size, files=files).to_file(temporary / _ABOUT)
            finishing.close()

        temporary = Path(gather_values(run_or_fail_together(group, failed, begin), group)[0])
        run_or_fail_together(group, failed, fill)
        share = slice(rank, None, world_size)
        parts = gather_values(
            run_or_fail_together(group, failed, lambda: sha256_of_files(temporary, share)), group
        )
        files = {name: checksum for part in parts for name, checksum in part.items()}
        run_or_fail_together(group, failed, finish)


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: it is a file: name a folder")
    if Path.cwd().is_relative_to(folder.resolve()):
        raise UserError(f"{folder}: the working directory cannot be replaced: name one below it")
    for path in sorted(folder.glob("*")):
        if path.name not in (_ABOUT, _FILE) and not path.match(_OF_RANKS):
            raise UserError(
                f"{folder}: it holds {path.name}, which save has not written and would remove: "
                "name another folder"
            )


def check(folder: Path, state: State, rank: int, world_size: int) -> int:
    """Check that the folder has all of a model; each rank compares a part of the checksums.

    Returns:
        the number of ranks whose files `read_rank` finds there.

    Raises:
        OSError, SafetensorError: it cannot be read.
        UserError: it is missing, damaged or of another model, or other parameters are frozen.
    """
    about = _about(folder)
    _check_model(folder, state)
    files, ranks = about.files, about.ranks
    if not any(folder.glob(_OF_RANKS)):
        files, ranks = {_FILE: files[_FILE]}, 0
    if damage := find_damage(folder, files, slice(rank, None, world_size)):
        name, what = damage
        fix = "" if name == _FILE else f", or {_WITHOUT_RESIDUALS}"
        raise UserError(f"{folder / name}: {what}: load another folder{fix}")
    return ranks


def read_rank(folder: Path, ranks: int, rank: int, world_size: int, error_feedback: bool) -> State:
    """Return this rank's own state, merged where the number of ranks has changed.

    Args:
        ranks: whose files the folder has.

    Raises:
        UserError: it cannot be merged, or needs error feedback.
    """
    if ranks == world_size:
        state = load_state(folder / _file_of(rank))
    elif ranks:
        saved = [load_state(folder / _file_of(number)) for number in range(ranks)]
        try:
            states = [state.get("communication", {}) for state in saved]
            state = {"communication": merge_states(states, world_size, rank)}
        except UserError as error:
            raise UserError(f"{folder}: {error}; or {_WITHOUT_RESIDUALS}") from error
    else:
        state = {}
    communication = state.get("communication", {})
    if not error_feedback and any(RESIDUALS in name for name in communication):
        raise UserError(
            f"{folder}: it holds residuals: set error_feedback=True, or {_WITHOUT_RESIDUALS}"
        )
    return state


def fill(folder: Path, state: State) -> dict[str, Tensor]:
    """Read into tensors by kind and name; return the `extra` ones."""
    with safe_open(folder / _FILE, "pt") as file:
        for name, tensor in _flat(state).items():
            tensor.copy_(file.get_tensor(name))
        extra = [name for name in file.keys() if name.startswith(f"{_EXTRA}.")]  # noqa: SIM118
        return {name.removeprefix(f"{_EXTRA}."): file.get_tensor(name) for name in extra}


def _about(folder: Path) -> About:
    path = folder / _ABOUT
    if not path.is_file():
        raise UserError(f"{path}: there is none: name a folder of SlideFSDP.save that ranks see")
    return About.from_file(path, "load another folder")


def _check_model(folder: Path, state: State) -> None:
    with safe_open(folder / _FILE, "pt") as file:
        known = set(file.keys())
        for name, tensor in _flat(state).items():
            _check_split(folder, name, known)
            shape = file.get_slice(name).get_shape() if name in known else None
            if shape != [*tensor.shape]:
                raise UserError(
                    f"{folder}: of another model: {name} has the shape {shape}, in this one "
                    f"{[*tensor.shape]}"
                )


def _check_split(folder: Path, name: str, known: Container[str]) -> None:
    """Refuse a change of what is frozen: its moments are missing, or would be lost."""
    kind, _, parameter = name.partition(".")
    if f"{_OTHER.get(kind)}.{parameter}" in known:
        trained = kind == FROZEN
        raise UserError(
            f"{folder}: {parameter} was {'trained' if trained else 'frozen'}: set its "
            f"requires_grad to {trained} before SlideFSDP takes the model, or start from what "
            "state_dict() gave"
        )


def _file_of(rank: int) -> str:
    return _OF_RANKS.replace("*", f"{rank:05d}")


def _flat(state: State) -> dict[str, Tensor]:
    return {f"{kind}.{name}": t for kind, named in state.items() for name, t in named.items()}
