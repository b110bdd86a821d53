"""The compiled kernels, called through ctypes, and the choice between them, Triton and PyTorch.

The shared library of csrc/ lies beside this module, once for every processor and once each for
AVX2 and AVX-512; the widest that the processor supports is loaded. All compute the same bits.
ctypes releases the interpreter lock while a kernel runs, so that other threads communicate.
`SHARDLAB_KERNELS=reference` in the environment disables the library.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor

from shardlab.codecs.kernels import build
from shardlab.core.errors import UserError
from shardlab.core.progress import say

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


_INSTRUCTIONS = {"v3": "AVX2", "v4": "AVX-512"}
_fault = "SHARDLAB_KERNELS=reference"
"""why the reference serves, where it does"""


def serving() -> str:
    """Return which library computes, with the hash of its sources; or the reference, and why."""
    loaded = library()
    if loaded is None:
        why = _fault.replace(f"{build.SOURCES.parent}/", "")
        return f"PyTorch reference ({why})"
    path = Path(loaded._name)
    width = _INSTRUCTIONS.get(path.stem.rpartition("_")[2], "baseline")
    return f"{path.name} ({width}), csrc {(build.built_from(path) or 'unknown')[:12]}"


def available() -> bool:
    """Return whether the compiled kernels are used; otherwise their PyTorch reference is."""
    return library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """Load the kernels; None where there are none, which the first call reports on stderr.

    In a source tree, libraries that are damaged or differ from csrc/ are built again.
    The answer is kept for the life of the process and of those forked from it.

    Raises:
        UserError: `SHARDLAB_KERNELS` has an unknown value, or csrc/ does not compile.
    """
    wanted = os.environ.get("SHARDLAB_KERNELS", "")
    if wanted not in ("", "reference"):
        raise UserError(f"SHARDLAB_KERNELS: set it to 'reference' or not at all (found {wanted!r})")
    if wanted == "reference":
        return None
    global _fault
    try:
        return _load()
    except OSError as error:
        _fault = str(error)
    if build.SOURCES.is_dir() and build.has_compiler():
        say(f"shardlab: {_fault}: building csrc/")
        try:
            build.build()
            return _load()
        except OSError as error:  # such as a tree that this user cannot write
            _fault = str(error)
    say(f"shardlab: {_fault}: using the PyTorch reference, slower")
    return None


def _load() -> ctypes.CDLL:
    """Load the fastest library.

    Raises:
        OSError: it cannot serve, or the system refuses it, such as for an older C++ runtime.
    """
    build.check([build.LIBRARY, *_wider(range(2, 5))])
    return ctypes.CDLL(str(builds()[-1]))


def builds() -> list[Path]:
    """Return the libraries that this CPU runs, the fastest last."""
    level = ctypes.CDLL(str(build.LIBRARY)).shardlab_cpu_level()
    return [build.LIBRARY, *_wider(range(2, level + 1))]


def _wider(levels: range) -> list[Path]:
    """Return the libraries for wider instruction sets, as far as the compiler made them."""
    name = build.LIBRARY.stem
    paths = [build.LIBRARY.with_stem(f"{name}_v{level}") for level in levels]
    return [path for path in paths if path.exists()]


def function(name: str, *arguments: type) -> Callable[..., None]:
    """Return the kernel `name` of csrc/, bound when it is first called.

    Raises:
        UserError: (when called) the library was built from sources without it.
    """

    @cache
    def bound() -> Callable[..., None]:
        loaded = library()
        assert loaded is not None, "callers ask `compiled` first"
        found: Any = getattr(loaded, name, None)
        if found is None:
            raise UserError(f"{build.LIBRARY}: {name} is missing: reinstall shardlab")
        found.argtypes = arguments
        found.restype = None
        return cast(Callable[..., None], found)

    return lambda *values: bound()(*values)


def compiled(values: Tensor) -> bool:
    """Return whether the compiled kernels serve this vector; otherwise the reference does."""
    return values.device.type == "cpu" and library() is not None


def triton_kernels(values: Tensor) -> ModuleType | None:
    """Return `shardlab.codecs.kernels.triton` for a vector on a GPU where Triton is installed, or None."""
    return _triton() if values.is_cuda else None


@cache
def _triton() -> ModuleType | None:
    if find_spec("triton") is None:
        say("shardlab: Triton is not installed: using the PyTorch reference on the GPU, slower")
        return None
    import shardlab.codecs.kernels.triton.formats
    import shardlab.codecs.kernels.triton.indices
    import shardlab.codecs.kernels.triton.random
    import shardlab.codecs.kernels.triton.scatter
    import shardlab.codecs.kernels.triton.select
    import shardlab.codecs.kernels.triton.sign
    import shardlab.codecs.kernels.triton.sketch

    return shardlab.codecs.kernels.triton


def address(vector: Tensor | None) -> int | None:
    """Return where a vector begins in memory."""
    return None if vector is None else vector.data_ptr()


def addresses(vectors: Sequence[Tensor]) -> Any:
    """Return an array of the addresses of vectors, as the C ABI takes it."""
    return (ctypes.c_void_p * len(vectors))(*(each.data_ptr() for each in vectors))
