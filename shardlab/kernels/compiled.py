"""PyTorch references of kernels, compiled on GPUs.

Experimental: this code has not run on a GPU.
"""

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from operator import index
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

BACKENDS = {"cuda": "inductor"}
"""Backends of `torch.compile` by type of device; references are not compiled on other devices."""
_RECOMPILE_LIMIT = 256
"""Largest number of compiled versions of a reference, one per format, group size and kind of
length; torch's default is 8."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled_on_gpus(reference: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function of tensors with `torch.compile` for tensors on a GPU.

    The function is captured as one graph with dynamic shapes, or the call fails. Each new format,
    group size and kind of length is compiled at its first call. Since every step sends the same
    messages, this happens in the warm-up steps.
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
    """Return the number as a constant of the compiled graph.

    torch.compile would make an attribute of an object an input of the graph: kernels would then
    divide by a variable, and powers of it would be floating-point numbers.
    """
    return index(number)
