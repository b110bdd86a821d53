"""What `SlideFSDP` saves: a folder that all ranks write and read together.

slide.safetensors                   parameters, frozen ones and optimizer states by the names of the
                                    model
communication-00000.safetensors     of each rank, where codecs have a state: residuals and counters
"""

from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardlab.comm.gather import gather_values
from shardlab.comm.handle import RESIDUALS, merge_states
from shardlab.core.errors import UserError
from shardlab.core.files import atomic
from shardlab.engines.base import State
from shardlab.engines.slide.unit import FROZEN

_FILE = "slide.safetensors"
_OF_RANKS = "communication-*.safetensors"
_OTHER = {"parameter": FROZEN, FROZEN: "parameter"}


@contextmanager
def together(group: dist.ProcessGroup, failed: str) -> Iterator[None]:
    """Ends when the block has ended on all ranks; with an error on all if it has one on any.

    Args:
        group: of all ranks, on gloo.
        failed: what the error begins with.

    Raises:
        UserError: tells the error of the first rank that has one.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    account = None if mine is None else " ".join(str(mine).split()) or type(mine).__name__
    for rank, told in enumerate(gather_values(account, group)):
        if told is not None:
            raise UserError(f"{failed} (rank {rank}: {told})") from mine


def write(folder: Path, state: State, of_rank: State, group: dist.ProcessGroup) -> None:
    """Makes the folder, whole or not at all.

    Args:
        state: by kind and name, written by rank 0.
        of_rank: `Engine.rank_state()` of each rank.

    Raises:
        UserError: a rank cannot write; on all ranks.
    """
    failed = f"{folder}: cannot be written: it needs room, and all ranks have to see it"
    rank, place = dist.get_rank(group), folder
    with ExitStack() as finishing:
        with together(group, failed):
            if rank == 0:
                place = finishing.enter_context(atomic(folder))
                place.mkdir()
        place = Path(gather_values(str(place.absolute()), group)[0])
        with together(group, failed):
            if of_rank["communication"]:
                save_file(of_rank["communication"], place / _OF_RANKS.replace("*", f"{rank:05d}"))
            if rank == 0:
                save_file({**_flat(state), **of_rank["extra"]}, place / _FILE)
        with together(group, failed):
            finishing.close()


def check(folder: Path, state: State) -> None:
    """Looks whether the folder has all of a model, without reading it.

    Raises:
        OSError, SafetensorError: it is not there or damaged.
        UserError: it is of another model, or other parameters of it are frozen.
    """
    with safe_open(folder / _FILE, "pt") as file:
        known = set(file.keys())
        for name, tensor in _flat(state).items():
            _check_split(name, known)
            shape = file.get_slice(name).get_shape() if name in known else None
            if shape != [*tensor.shape]:
                raise UserError(
                    f"of another model: {name} has the shape {shape}, in this one {[*tensor.shape]}"
                )


def _check_split(name: str, known: Container[str]) -> None:
    """The moments of a parameter that was frozen do not exist, and others would be lost."""
    kind, _, parameter = name.partition(".")
    if f"{_OTHER.get(kind)}.{parameter}" in known:
        trained = kind == FROZEN
        raise UserError(
            f"{parameter} was {'trained' if trained else 'frozen'}: set its requires_grad to "
            f"{trained} before SlideFSDP takes the model, or begin anew with what state_dict() gave"
        )


def fill(folder: Path, state: State) -> dict[str, Tensor]:
    """Reads into tensors by kind and name, and returns what there is besides by name alone."""
    with safe_open(folder / _FILE, "pt") as file:
        for name, tensor in _flat(state).items():
            tensor.copy_(file.get_tensor(name))
        return {name: file.get_tensor(name) for name in file.keys() if "." not in name}  # noqa: SIM118


def communication(
    folder: Path, world_size: int, rank: int, error_feedback: bool
) -> dict[str, Tensor]:
    """What this rank's codecs go on with; put together where there were other ranks.

    Raises:
        UserError: it serves the same ranks alone, or error feedback alone.
    """
    paths = sorted(folder.glob(_OF_RANKS))
    begin_anew = f"remove {_OF_RANKS} from the folder to begin without what was held back"
    if len(paths) == world_size:
        state = _load(paths[rank])
    else:
        try:
            state = merge_states([_load(p) for p in paths], world_size, rank) if paths else {}
        except UserError as error:
            raise UserError(f"{error}; or {begin_anew}") from error
    if not error_feedback and any(name.startswith(RESIDUALS) for name in state):
        raise UserError(f"it holds residuals: set error_feedback=True, or {begin_anew}")
    return state


def _flat(state: State) -> dict[str, Tensor]:
    return {f"{kind}.{name}": t for kind, named in state.items() for name, t in named.items()}


def _load(path: Path) -> dict[str, Tensor]:
    # as they lie in the file, tensors may begin at odd addresses
    return {name: tensor.clone() for name, tensor in load_file(path).items()}
