"""Where torch's generators of a process are."""

import torch
from torch import Tensor

_CUDA = torch.device("cuda")


def random_state(device: torch.device = _CUDA) -> dict[str, Tensor]:
    """Of the CPU and, where there is one, of a GPU.

    Args:
        device: that computes; by default the current GPU.
    """
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda" and torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device = _CUDA) -> None:
    """Continues from `random_state()`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"], device)
