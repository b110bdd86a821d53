"""The compiled kernels of csrc/: their build, and calls through ctypes.

    python -m shardlab.kernels.native

builds them beside this module: one library for all processors, one for AVX2 and one for AVX-512.
The widest that the processor supports is loaded. All compute the same bits as the PyTorch
reference, which runs if there are no kernels, or if `SHARDLAB_KERNELS=reference` is set in the
environment. ctypes releases the interpreter lock while a kernel runs, so that other threads can
communicate.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from shardlab.core.errors import UserError
from shardlab.core.files import atomic
from shardlab.core.progress import say

LIBRARY = Path(__file__).with_name("libshardlab_kernels.so")
"""Library for all CPUs; libraries for levels of x86-64 add _v3 or _v4 to the name."""
TREE = Path(__file__).parents[2]
"""Folder of csrc/ in a source tree; an installed package has no csrc/."""
_INSTRUCTIONS = {"v3": "AVX2", "v4": "AVX-512"}
_why_reference = ""


def serving() -> str:
    """Return the name of the loaded library with the hash of its sources, or why there is none."""
    loaded = library()
    if loaded is None:
        return f"PyTorch reference ({_why_reference})"
    path = Path(loaded._name)  # noqa: SLF001 - documented by ctypes
    width = _INSTRUCTIONS.get(path.stem.rpartition("_")[2], "baseline")
    return f"{path.name} ({width}), csrc {(built_from(path) or 'unknown')[:12]}"


def available() -> bool:
    """Return whether the compiled kernels are used, and not the PyTorch reference."""
    return library() is not None


def compiled(values: Tensor) -> bool:
    """Return whether the compiled kernels are used for this vector, and not the reference."""
    return values.device.type == "cpu" and library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """Return the loaded kernels, or None if there are none; the first call reports why on stderr.

    In a source tree, libraries that differ from csrc/ are built again. The result holds for the
    life of the process and of its forks.

    Raises:
        UserError: `SHARDLAB_KERNELS` has an unknown value, or csrc/ does not compile.
    """
    global _why_reference
    choice = os.environ.get("SHARDLAB_KERNELS", "")
    if choice not in ("", "reference"):
        raise UserError(f"SHARDLAB_KERNELS: set it to 'reference' or not at all (found {choice!r})")
    if choice == "reference":
        _why_reference = "SHARDLAB_KERNELS=reference"
        return None
    expected = source_hash()
    try:
        if expected is not None and built_from(LIBRARY) != expected and _has_compiler():
            say("shardlab: building csrc/, about a minute, once")
            build()
        if LIBRARY.exists():
            return ctypes.CDLL(str(builds()[-1]))
        _why_reference = "no compiled kernels (no C++ compiler?)"
    except OSError as error:  # a library of another architecture, or a tree that cannot be written
        _why_reference = str(error)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # not once per rank of torchrun
        say(
            f"shardlab: warning: {_why_reference}: using the PyTorch reference, slower; "
            "install a C++ compiler, then shardlab again"
        )
    return None


def builds() -> list[Path]:
    """Return the libraries that this CPU can run, the fastest last."""
    level = ctypes.CDLL(str(LIBRARY)).shardlab_cpu_level()
    wider = [LIBRARY.with_stem(f"{LIBRARY.stem}_v{number}") for number in range(2, level + 1)]
    return [LIBRARY, *(path for path in wider if path.exists())]


def source_hash() -> str | None:
    """Return the SHA-256 of csrc/ as in csrc/CMakeLists.txt, or None without csrc/."""
    sources = TREE / "csrc"
    if not sources.is_dir():
        return None
    names = [path for path in sources.iterdir() if path.suffix in (".cpp", ".h")]
    lines = "".join(
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in sorted([*names, sources / "CMakeLists.txt"])
    )
    return hashlib.sha256(lines.encode()).hexdigest()


def built_from(path: Path) -> str | None:
    """Return the SHA-256 of the sources that a library was built from (csrc/cpu.cpp), if known."""
    content = path.read_bytes() if path.exists() else b""
    match = re.search(rb"shardlab-sources:([0-9a-f]{64})", content)
    return match and match[1].decode()


def build() -> None:
    """Build csrc/ with CMake and rename the libraries into place.

    One process builds at a time. Processes that have loaded older libraries keep them.

    Raises:
        UserError: The sources do not compile.
        OSError: CMake or Ninja is missing, or the source tree cannot be written.
    """
    folder = TREE / "build"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / ".lock"):
        configure = ("cmake", "-S", str(TREE / "csrc"), "-B", str(folder), "-G", "Ninja")
        try:
            _run(*configure)
        except UserError:  # CMake refuses a cache with the paths from before a move of the tree
            _run(*configure, "--fresh")
        _run("cmake", "--build", str(folder))
        for built in folder.glob(f"{LIBRARY.stem}*{LIBRARY.suffix}"):
            with atomic(LIBRARY.with_name(built.name)) as temporary:
                shutil.copyfile(built, temporary)


def _has_compiler() -> bool:
    compilers = [os.environ.get("CXX", "c++"), "g++", "clang++"]
    return shutil.which("cmake") is not None and any(map(shutil.which, compilers))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines(), "no output"]
        first = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise UserError(
            f"csrc: the kernels do not compile: {first.strip()}: fix it, or set "
            "SHARDLAB_KERNELS=reference"
        )


def check(name: str, vector: Tensor, size: int, device: torch.device, *dtypes: torch.dtype) -> None:
    """Check that a vector is contiguous and has this size, type and device.

    Kernels get addresses, so they cannot check it.

    Raises:
        ValueError: The vector has another property; the message names it.
    """
    is_valid = vector.shape == (size,) and vector.is_contiguous() and vector.dtype in dtypes
    if not is_valid or vector.device != device:
        raise ValueError(
            f"{name} must be a contiguous vector of {size} {' or '.join(map(str, dtypes))} on "
            f"{device}, not {vector.dtype} of shape {tuple(vector.shape)} and strides "
            f"{vector.stride()} on {vector.device}"
        )


def check_floats(first: Tensor, **vectors: Tensor | None) -> None:
    """Check that vectors are contiguous float32 of one length and device; skip None."""
    size, device = first.numel(), first.device
    check("the vector", first, size, device, torch.float32)
    for name, vector in vectors.items():
        if vector is not None:
            check(name, vector, size, device, torch.float32)


def check_positions(positions: Tensor, values: Tensor) -> None:
    """Check that positions are a contiguous int32 vector as long as `values`."""
    check("positions", positions, values.numel(), values.device, torch.int32)


if __name__ == "__main__":
    build()
