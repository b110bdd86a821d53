"""The compiled kernels: a shared library beside this module, called through ctypes.

ctypes releases the interpreter lock while a kernel runs, so communication threads go on.
`SHARDLAB_KERNELS=reference` in the environment leaves the library aside.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.progress import say

LIBRARY = Path(__file__).with_name("libshardlab_kernels.so")

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# csrc/kernels.h
_SIGNATURES = {
    "int8_encode": (_POINTER, _INT, _INT, _POINTER),
    "int8_encode_residual": (_POINTER, _POINTER, _INT, _INT, _POINTER),
    "int8_decode_add": (_POINTER, _INT, _INT, _FLOAT, _POINTER),
    "bf16_encode": (_POINTER, _INT, _POINTER),
    "bf16_encode_residual": (_POINTER, _POINTER, _INT, _POINTER),
    "bf16_decode_add": (_POINTER, _INT, _FLOAT, _POINTER),
}


def available() -> bool:
    """Whether kernels run compiled; otherwise their PyTorch reference does."""
    return library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where there are none to use; the first call says so on stderr.

    The answer is kept for the life of the process and of those forked from it.

    Raises:
        UserError: `SHARDLAB_KERNELS` has an unknown value, or the library lacks a kernel.
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
    loaded = ctypes.CDLL(str(LIBRARY))
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is None:
            raise UserError(f"{LIBRARY}: built from older sources ({name} is missing): reinstall")
        function.argtypes = arguments
        function.restype = None
    return loaded
