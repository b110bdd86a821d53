"""Named tensors in files of safetensors, which nothing ever unpickles, and random states."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardlab.engines.base import EngineState


def in_host_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies that later changes of the tensors do not reach."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors that share no memory."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(mode)  # by the umask, where safetensors makes a file for its owner alone


def save_state(path: Path, state: EngineState) -> None:
    """Write tensors under the keys KIND.NAME."""
    kinds = state.items()
    save_tensors(path, {f"{kind}.{name}": t for kind, named in kinds for name, t in named.items()})


def load_state(path: Path) -> EngineState:
    """Read what `save_state` wrote; kinds without tensors are absent."""
    state: EngineState = {}
    for key, tensor in load_file(path).items():
        kind, _, name = key.partition(".")
        # as they lie in the file, tensors may begin at odd addresses
        state.setdefault(kind, {})[name] = tensor.clone()
    return state


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators: of the CPU, and of a GPU that computes.

    To ask another GPU would take memory of it.
    """
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore the result of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
