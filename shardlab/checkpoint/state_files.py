"""Named tensors in a file of safetensors, which nothing ever unpickles."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from shardlab.engines.common.base import State


def in_host_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that later changes of the tensors do not reach."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors that share no memory."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def save_state(path: Path, state: State) -> None:
    """Writes tensors under the keys KIND.NAME."""
    kinds = state.items()
    save_tensors(path, {f"{kind}.{name}": t for kind, named in kinds for name, t in named.items()})


def load_state(path: Path) -> State:
    """What `save_state` wrote; kinds without tensors are absent."""
    state: State = {}
    for key, tensor in load_file(path).items():
        kind, _, name = key.partition(".")
        # as they lie in the file, tensors may begin at odd addresses
        state.setdefault(kind, {})[name] = tensor.clone()
    return state
