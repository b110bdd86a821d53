"""The Triton kernels, for vectors on a GPU where Triton is installed."""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

from shardlab.core.progress import say


def triton_kernels(values: Tensor) -> ModuleType | None:
    """`shardlab.kernels.triton` with everything in it, or None where the reference serves."""
    return _loaded() if values.is_cuda else None


@cache
def _loaded() -> ModuleType | None:
    if find_spec("triton") is None:
        say("shardlab: Triton is not installed: using the PyTorch reference on the GPU, slower")
        return None
    import shardlab.kernels.triton.formats
    import shardlab.kernels.triton.select

    return shardlab.kernels.triton
