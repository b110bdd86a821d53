"""Control of storage_shim.c, which fails chosen calls of processes that preload it."""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "STORAGE_FAULTS"
"""names the file that the shim and this process map"""
_SHIM = Path(__file__).with_name("storage_shim.c")
_LASTING = (errno.ENOSPC, errno.EROFS)


def preloaded(control: Path) -> dict[str, str]:
    """Compile the shim next to the file of its control; return the environment that loads it."""
    library = control.with_name("storage_shim.so")
    control.write_bytes(bytes(ctypes.sizeof(Control)))
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, _SHIM, "-ldl"], check=True)
    own = {"LD_PRELOAD": str(library), VARIABLE: str(control), "OMP_NUM_THREADS": "1"}
    # Python's own files of bytecode are none of a stage's outputs
    return {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1"}


class Control(ctypes.Structure):
    """Memory shared with all processes of a stage, as the shim declares it."""

    _fields_ = (
        ("calls", ctypes.c_long),
        ("first", ctypes.c_long),
        ("last", ctypes.c_long),
        ("number", ctypes.c_long),
        ("root", ctypes.c_char * 1024),
        ("failed", ctypes.c_char * 1024),
    )

    def arm(self, root: Path, first: int = 0, number: int = 0) -> None:
        """Count calls below a folder from now on; fail the one with this number."""
        self.root, self.calls, self.failed = b"", 0, b""
        self.first, self.number = first, number
        self.last = sys.maxsize if number in _LASTING else first
        self.root = os.fsencode(root)


@contextmanager
def shared_control() -> Iterator[Control]:
    """Map the memory that the shim of this process has mapped."""
    with Path(os.environ[VARIABLE]).open("r+b") as file:
        yield Control.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Control)))
