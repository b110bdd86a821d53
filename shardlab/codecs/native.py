"""The compiled kernels of csrc/: their build, and calls through ctypes.

    python -m shardlab.codecs.native

builds them beside this module: a library for every processor and one each for AVX2 and AVX-512, of
which the widest that the processor supports is loaded. All compute the bits of the PyTorch
reference, which serves where there are none, and where `SHARDLAB_KERNELS=reference` is set in the
environment. ctypes releases the interpreter lock while a kernel runs, so that other threads
communicate.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock
from torch import Tensor

from shardlab.core.errors import UserError
from shardlab.core.files import atomic
from shardlab.core.progress import say

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
INT32, WORD = ctypes.c_int32, ctypes.c_uint32

LIBRARY = Path(__file__).with_name("libshardlab_kernels.so")
"""for every CPU; those for levels of x86-64 have _v3 and _v4 after the name"""
TREE = Path(__file__).parents[2]
"""csrc/ is in it in a source tree; an installed package has the libraries alone"""
_INSTRUCTIONS = {"v3": "AVX2", "v4": "AVX-512"}
_why_reference = ""


def serving() -> str:
    """Return which library computes, with the hash of its sources; or the reference, and why."""
    loaded = library()
    if loaded is None:
        return f"PyTorch reference ({_why_reference})"
    path = Path(loaded._name)
    width = _INSTRUCTIONS.get(path.stem.rpartition("_")[2], "baseline")
    return f"{path.name} ({width}), csrc {(built_from(path) or 'unknown')[:12]}"


def available() -> bool:
    """Return whether the compiled kernels are used; otherwise their PyTorch reference is."""
    return library() is not None


def compiled(values: Tensor) -> bool:
    """Return whether the compiled kernels serve this vector; otherwise the reference does."""
    return values.device.type == "cpu" and library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """Load the kernels; None where there are none, which the first call reports on stderr.

    In a source tree, libraries that differ from csrc/ are built again. The answer is kept for the
    life of the process and of those forked from it.

    Raises:
        UserError: `SHARDLAB_KERNELS` has an unknown value, or csrc/ does not compile.
    """
    global _why_reference
    wanted = os.environ.get("SHARDLAB_KERNELS", "")
    if wanted not in ("", "reference"):
        raise UserError(f"SHARDLAB_KERNELS: set it to 'reference' or not at all (found {wanted!r})")
    if wanted == "reference":
        _why_reference = "SHARDLAB_KERNELS=reference"
        return None
    expected = source_hash()
    try:
        if expected is not None and built_from(LIBRARY) != expected and _has_compiler():
            say("shardlab: building csrc/")
            build()
        if LIBRARY.exists():
            return ctypes.CDLL(str(builds()[-1]))
        _why_reference = "no compiled kernels (no C++ compiler?)"
    except OSError as error:  # a library of another architecture, or a tree that cannot be written
        _why_reference = str(error)
    say(f"shardlab: {_why_reference}: using the PyTorch reference, slower")
    return None


def builds() -> list[Path]:
    """Return the libraries that this CPU runs, the fastest last."""
    level = ctypes.CDLL(str(LIBRARY)).shardlab_cpu_level()
    wider = [LIBRARY.with_stem(f"{LIBRARY.stem}_v{number}") for number in range(2, level + 1)]
    return [LIBRARY, *(path for path in wider if path.exists())]


def source_hash() -> str | None:
    """Return the SHA-256 of csrc/ as csrc/CMakeLists.txt computes it; None without csrc/."""
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
    found = re.search(rb"shardlab-sources:([0-9a-f]{64})", content)
    return found and found[1].decode()


def build() -> None:
    """Build csrc/ with CMake and rename the libraries into place; do nothing without a compiler.

    One process builds at a time; processes that run older libraries keep them.

    Raises:
        UserError: the sources do not compile.
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


def function(name: str, *arguments: type) -> Callable[..., None]:
    """Return the kernel `name` of csrc/, bound when it is first called.

    Raises:
        UserError: (when called) the library was built from sources without it.
    """

    @cache
    def bound() -> Callable[..., None]:
        found: Any = getattr(library(), name, None)
        if found is None:
            raise UserError(f"{LIBRARY}: {name} is missing: reinstall shardlab")
        found.argtypes = arguments
        found.restype = None
        return cast(Callable[..., None], found)

    return lambda *values: bound()(*values)


# The plain registration rather than `torch.library.custom_op`: it costs 2 us per call, not 18, and
# an engine makes one call for each message.
_OPERATORS = torch.library.Library("shardlab", "FRAGMENT")


def operator(schema: str, run: Callable[..., None]) -> Callable[..., None]:
    """Register `run` as `shardlab::NAME`, by which profiles and fake tensors know a kernel.

    Args:
        schema: `NAME(arguments) -> ()`. All outputs are arguments that the kernel writes to, so it
            does nothing for fake tensors.
    """
    name = schema.partition("(")[0]
    _OPERATORS.define(schema)
    _OPERATORS.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardlab::{name}", lambda *_: None, lib=_OPERATORS)
    result: Callable[..., None] = getattr(torch.ops.shardlab, name).default
    return result


def address(vector: Tensor | None) -> int | None:
    """Return where a vector begins in memory."""
    return None if vector is None else vector.data_ptr()


def addresses(vectors: Sequence[Tensor]) -> Any:
    """Return an array of the addresses of vectors, as the C ABI takes it."""
    return (ctypes.c_void_p * len(vectors))(*(vector.data_ptr() for vector in vectors))


def integers(values: Sequence[int]) -> Any:
    """Return an array of int64, as the C ABI takes it."""
    return (ctypes.c_int64 * len(values))(*values)


def check_floats(**vectors: Tensor | None) -> None:
    """Refuse all but contiguous float32 vectors of one length and device: kernels get addresses.

    Args:
        vectors: by the name for messages; None is skipped.

    Raises:
        ValueError: names the vector and what it is instead.
    """
    first: Tensor | None = None
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.dtype != torch.float32 or vector.dim() != 1 or not vector.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous float32 vector, not {vector.dtype} of shape "
                f"{tuple(vector.shape)} and strides {vector.stride()}"
            )
        first = vector if first is None else first
        if vector.numel() != first.numel() or vector.device != first.device:
            raise ValueError(f"{name} must have the length and device of {next(iter(vectors))}")


def check_payload(payload: Tensor, size: int, like: Tensor) -> None:
    """Refuse a buffer that is no contiguous uint8 vector of `size` bytes on the device of `like`.

    Raises:
        ValueError: what it is instead.
    """
    if payload.dtype != torch.uint8 or payload.shape != (size,) or not payload.is_contiguous():
        raise ValueError(
            f"payload must be a contiguous uint8 vector of {size} bytes, not {payload.dtype} of "
            f"shape {tuple(payload.shape)} and strides {payload.stride()}"
        )
    if payload.device != like.device:
        raise ValueError(f"payload is on {payload.device}, the values on {like.device}")


def check_positions(positions: Tensor, values: Tensor) -> None:
    """Refuse all but a contiguous int32 vector as long as `values`.

    Raises:
        ValueError: it is something else.
    """
    good = positions.dtype == torch.int32 and positions.is_contiguous()
    if not good or positions.shape != values.shape:
        raise ValueError("positions must be a contiguous int32 vector, one for each value")


if __name__ == "__main__":
    build()
