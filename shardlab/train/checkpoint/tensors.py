"""Named tensors in a file of safetensors, which nothing ever unpickles."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardlab.engines.base import State


def save_state(path: Path, state: State, metadata: Mapping[str, str]) -> None:
    """Writes tensors under the keys KIND.NAME, and some text."""
    flat = {f"{kind}.{name}": t for kind, tensors in state.items() for name, t in tensors.items()}
    save_tensors(path, flat, metadata)


def load_state(path: Path) -> tuple[State, dict[str, str]]:
    """What `save_state` wrote; kinds without tensors are absent."""
    state: State = {}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            kind, _, name = key.partition(".")
            state.setdefault(kind, {})[name] = file.get_tensor(key)
        return state, file.metadata()


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors that share no memory."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, dict(metadata or {}))
