"""Build of the compiled kernels from csrc/, and the check that a library was built from it.

python -m shardlab.codecs.kernels.build
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.files import atomic

LIBRARY = Path(__file__).with_name("libshardlab_kernels.so")
"""for every CPU; those for levels of x86-64 have _v3 and _v4 after the name"""
_TREE = Path(__file__).parents[3]
SOURCES = _TREE / "csrc"
"""present in a source tree only; an installed package has the libraries alone"""

_MARK = b"shardlab-sources:"
"""precedes the hash of the sources in a library (csrc/cpu.cpp)"""
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183, "ppc64le": 21, "riscv64": 243, "s390x": 22}


def source_hash() -> str | None:
    """Return the SHA-256 of csrc/ as csrc/CMakeLists.txt computes it; None without csrc/."""
    if not SOURCES.is_dir():
        return None
    names = [path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h")]
    lines = "".join(
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in sorted([*names, SOURCES / "CMakeLists.txt"])
    )
    return hashlib.sha256(lines.encode()).hexdigest()


def built_from(library: Path) -> str | None:
    """Return the SHA-256 of the sources that a library was built from; None for a foreign one."""
    found = re.search(re.escape(_MARK) + rb"([0-9a-f]{64})", library.read_bytes())
    return found and found[1].decode()


def check(libraries: Iterable[Path]) -> None:
    """Check that shared libraries can be loaded here and were built from csrc/, if it is there.

    Raises:
        OSError: one is not.
    """
    expected = source_hash()
    for path in libraries:
        content = path.read_bytes() if path.exists() else b""
        if fault := _find_fault(content, expected):
            raise OSError(
                f"{path} {fault}" if content else "no compiled kernels (no C++ compiler?)"
            )


def _find_fault(content: bytes, expected: str | None) -> str | None:
    """Return what is wrong with a library; None if nothing is.

    Looks at the file alone (elf(5)), because loading a truncated library ends the process by
    SIGBUS. Linkers end a file with the table of sections, so a shorter file is truncated.
    """
    if len(content) < 64 or content[:6] != b"\x7fELF\x02\x01":
        return "is no 64-bit ELF library"
    (machine,) = struct.unpack_from("<H", content, 18)
    if machine != _ELF_MACHINES.get(platform.machine(), machine):
        return f"was built for another architecture than {platform.machine()}"
    (table,) = struct.unpack_from("<Q", content, 40)
    entry_size, entries = struct.unpack_from("<HH", content, 58)
    if len(content) < table + entry_size * entries:
        return "is truncated"
    if expected is not None and _MARK + expected.encode() not in content:
        return f"was built from other sources than {SOURCES}"
    return None


def has_compiler() -> bool:
    """Return whether CMake and a C++ compiler are installed."""
    compilers = [os.environ.get("CXX", "c++"), "g++", "clang++"]
    return shutil.which("cmake") is not None and any(map(shutil.which, compilers))


def build() -> None:
    """Build csrc/ with CMake and rename the libraries into place; do nothing without a compiler.

    One process builds at a time; processes that run older libraries keep them.

    Raises:
        UserError: the sources do not compile.
        OSError: CMake or Ninja is missing, or the source tree cannot be written.
    """
    folder = _TREE / "build"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel when this process ends
        configure = ("cmake", "-S", str(SOURCES), "-B", str(folder), "-G", "Ninja")
        try:
            _run(*configure)
        except UserError:  # CMake refuses a cache with the paths from before a move of the tree
            _run(*configure, "--fresh")
        _run("cmake", "--build", str(folder))
        for built in folder.glob(f"{LIBRARY.stem}*{LIBRARY.suffix}"):
            with atomic(LIBRARY.with_name(built.name)) as temporary:
                shutil.copyfile(built, temporary)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        first = next(
            (line for line in lines if "error" in line.lower()), lines[-1] if lines else ""
        )
        raise UserError(
            f"csrc: the kernels do not compile: {first.strip()}: fix it, or set "
            "SHARDLAB_KERNELS=reference"
        )


if __name__ == "__main__":
    build()
