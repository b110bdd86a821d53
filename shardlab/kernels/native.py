"""The compiled kernels: shared libraries beside this module, called through ctypes.

One library runs on every processor; of those for AVX2 and AVX-512 the best that the processor runs
is taken. All compute the same bits.
ctypes releases the interpreter lock while a kernel runs, so communication threads go on.
`SHARDLAB_KERNELS=reference` in the environment leaves the library aside.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from shardlab.core.errors import UserError
from shardlab.core.progress import say

LIBRARY = Path(__file__).with_name("libshardlab_kernels.so")
"""for every processor; those for levels of x86-64 lie beside it, with _v3 and _v4 after the name"""

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def available() -> bool:
    """Whether kernels run compiled; otherwise their PyTorch reference does."""
    return library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where there are none to use; the first call says so on stderr.

    The answer is kept for the life of the process and of those forked from it.

    Raises:
        UserError: `SHARDLAB_KERNELS` has an unknown value.
    """
    wanted = os.environ.get("SHARDLAB_KERNELS", "")
    if wanted not in ("", "reference"):
        raise UserError(f"SHARDLAB_KERNELS: set it to 'reference' or not at all (found {wanted!r})")
    if wanted == "reference":
        return None
    if not LIBRARY.exists():
        say(
            "shardlab: no compiled kernels (no C++ compiler at installation?): "
            "using the PyTorch reference, slower"
        )
        return None
    return ctypes.CDLL(str(builds()[-1]))


def builds() -> list[Path]:
    """The libraries that this processor runs, the fastest last."""
    level = ctypes.CDLL(str(LIBRARY)).shardlab_cpu_level()
    wider = [LIBRARY.with_stem(f"{LIBRARY.stem}_v{wide}") for wide in range(2, level + 1)]
    return [LIBRARY, *(path for path in wider if path.exists())]


def function(name: str, *arguments: type) -> Callable[..., None]:
    """The kernel `name` of csrc/, bound when it is first called.

    Raises:
        UserError: (when called) the library was built from sources without it.
    """

    @cache
    def bound() -> Callable[..., None]:
        loaded = library()
        assert loaded is not None, "callers ask `compiled` first"
        found: Any = getattr(loaded, name, None)
        if found is None:
            raise UserError(f"{LIBRARY}: built from older sources ({name} is missing): reinstall")
        found.argtypes = arguments
        found.restype = None
        return cast(Callable[..., None], found)

    return lambda *values: bound()(*values)


def compiled(values: Tensor) -> bool:
    """Whether the compiled kernels serve for this vector; otherwise the PyTorch reference does."""
    return values.device.type == "cpu" and library() is not None
