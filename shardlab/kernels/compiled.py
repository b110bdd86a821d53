"""The PyTorch reference of kernels, compiled on GPUs.

Experimental: no GPU has run this yet.
"""

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from operator import index
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

BACKENDS = {"cuda": "inductor"}
"""of `torch.compile`, by the type of devices on which references are compiled"""
_RECOMPILE_LIMIT = 256
"""versions of one reference, for formats, groups and kinds of lengths; torch's default of 8 would
refuse the others"""

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
        options: dict[str, Any] = {"dynamic": True, "fullgraph": True, "backend": backend}
        if "recompile_limit" in signature(torch.compile).parameters:
            options["recompile_limit"] = _RECOMPILE_LIMIT
        else:  # torch 2.11 has one limit for the process
            config = torch.compiler.config
            config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
        return torch.compile(reference, **options)

    @wraps(reference)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        backend = BACKENDS.get(next(tensors).device.type)
        return (compiled(backend) if backend else reference)(*args, **kwargs)

    return run


def constant(number: int) -> int:
    """Return the number, a constant of each version that is compiled.

    torch.compile makes numbers of objects inputs, which kernels then divide by, and powers of them
    floating-point numbers.
    """
    return index(number)
