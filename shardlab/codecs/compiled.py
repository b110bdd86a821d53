"""The PyTorch reference of kernels, compiled on GPUs.

Experimental: no GPU has run this yet.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

BACKENDS = {"cuda": "inductor"}
"""of `torch.compile`, by the type of devices on which references are compiled"""
_RECOMPILE_LIMIT = 256
"""versions of one reference, for formats, groups and kinds of lengths; torch's default of 8 would
run the others eagerly, with a warning alone"""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled_on_gpus(reference: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function of tensors under `torch.compile` where they are on a GPU, as it is elsewhere.

    The graph is captured whole, with dynamic shapes, or the call fails. Each new format, group and
    kind of length is compiled when it first comes up: in the warm-up steps, since every step sends
    the same messages.
    """

    @cache
    def compiled(backend: str) -> Callable[_P, _R]:
        # torch declares no overload with the limit
        return torch.compile(  # type: ignore[call-overload, no-any-return]
            reference,
            dynamic=True,
            fullgraph=True,
            backend=backend,
            recompile_limit=_RECOMPILE_LIMIT,
        )

    @wraps(reference)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        backend = BACKENDS.get(next(tensors).device.type)
        return (compiled(backend) if backend else reference)(*args, **kwargs)

    return run
