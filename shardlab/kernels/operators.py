"""Calls of the compiled kernels, each of which is declared as an operator of torch."""

import ctypes
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlab.core.errors import UserError
from shardlab.kernels import native
from shardlab.kernels.workers import threads_for

# The plain registration rather than `torch.library.custom_op`: it costs 2 us per call, not 18, and
# an engine makes one call for each message.
_OPERATORS = torch.library.Library("shardlab", "FRAGMENT")


def kernel(name: str, arguments: str) -> Callable[..., None]:
    """Return the kernel `name` of csrc/, which profiles show as `shardlab::NAME`.

    Args:
        arguments: Arguments in the order of C. Arguments of the caller are written as in schemas of
            `torch.library`. C gets int as int64_t, bool as int and float as float. C gets a tensor
            as the address of its elements (null for None), and a list as the address of an array.
            `size(x)` is the length of argument x, and `threads(x)` a pool for as many elements.

    Raises:
        UserError: The library does not have the kernel; raised when it is called.
    """
    all_arguments = arguments.split(", ")
    declared = {text.split()[-1]: text for text in all_arguments if " " in text}
    kinds, sources = [], []
    for argument in all_arguments:
        derived, _, source = argument.rstrip(")").partition("(")
        kind = re.sub(r"\(.!\)", "", argument).split()[0] if " " in argument else derived
        name_of = argument.split()[-1] if " " in argument else source
        convert = _CONVERSIONS.get(kind)
        if kind == "size":
            convert = len if "[]" in declared[source] else Tensor.numel
        kinds.append(kind)
        sources.append((list(declared).index(name_of), convert))
    bound: Any = None

    def run(*values: Any) -> None:
        nonlocal bound
        if bound is None:
            bound = getattr(native.library(), name, None)
            if bound is None:
                raise UserError(f"{native.LIBRARY}: {name} is missing: reinstall shardlab")
            bound.argtypes = [_NUMBERS.get(kind, ctypes.c_void_p) for kind in kinds]
            bound.restype = None
        bound(*[values[i] if convert is None else convert(values[i]) for i, convert in sources])

    _OPERATORS.define(f"{name}({', '.join(declared.values())}) -> ()")
    _OPERATORS.impl(name, run, "CompositeExplicitAutograd")
    # does nothing for tensors without data, which have no addresses
    torch.library.register_fake(f"shardlab::{name}", lambda *_: None, lib=_OPERATORS)
    result: Callable[..., None] = getattr(torch.ops.shardlab, name).default
    return result


_NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int64,
    "size": ctypes.c_int64,
    "float": ctypes.c_float,
    "bool": ctypes.c_int,
}
_CONVERSIONS: dict[str, Callable[..., Any]] = {
    "Tensor": Tensor.data_ptr,
    "Tensor?": lambda vector: None if vector is None else vector.data_ptr(),
    "Tensor[]": lambda vectors: (ctypes.c_void_p * len(vectors))(*map(Tensor.data_ptr, vectors)),
    "int[]": lambda values: (ctypes.c_int64 * len(values))(*values),
    "float[]": lambda values: (ctypes.c_float * len(values))(*values),
    "threads": lambda vector: threads_for(vector.numel()),
}
