"""Tokens that rank 0 builds while the commands of other ranks wait, before they meet."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.data.tokens import MANIFEST, read_manifest

_POLL_S = 0.1
_FAILED = b"failed "


def build_once(tokens: Path, rank: int, build: Callable[[], object], patience_s: float) -> None:
    """Wait on every rank until the folder `tokens` has a manifest.

    To be called before the rendezvous, on any nodes, with a shared folder. Rank 0 calls `build`
    when there is no manifest, the others poll for it: a rendezvous or a collective could time out.

    Args:
        patience_s: longest wait without a sign of life from rank 0; a build may take any time.

    Raises:
        UserError: rank 0 failed or went silent.
    """
    sign = tokens.with_name(f".{tokens.name}-building")
    if rank > 0:
        _wait(tokens, sign, patience_s)
    elif not _is_built(tokens):
        with _signs_of_life(sign, patience_s / 4):
            build()


def _is_built(tokens: Path) -> bool:
    try:
        read_manifest(tokens)
    except UserError:
        return False
    return True


def _wait(tokens: Path, sign: Path, patience_s: float) -> None:
    # what an earlier build left says nothing about this one
    last, since = _read(sign), time.monotonic()
    while not _is_built(tokens):
        now = _read(sign)
        if now != last and now.startswith(_FAILED):
            raise UserError(f"{tokens}: rank 0 could not build it: see what rank 0 says")
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > patience_s:
            raise UserError(
                f"{tokens / MANIFEST}: waited {patience_s:g} s without a sign of life from rank 0, "
                "which makes it: see what rank 0 says, and whether all nodes share this folder"
            )
        time.sleep(_POLL_S)


def _read(sign: Path) -> bytes:
    """Return the contents, not the time: clocks of nodes differ, and NFS caches attributes."""
    try:
        return sign.read_bytes()
    except OSError:  # not written yet, or removed
        return b""


@contextmanager
def _signs_of_life(path: Path, every_s: float) -> Iterator[None]:
    """Change the contents of the file periodically, as long as this process lives.

    After an error the file stays: those who wait for the tokens find it there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(min(every_s, 1.0)):
            path.write_text(str(time.time_ns()))

    thread = threading.Thread(target=write, name="signs of life", daemon=True)
    thread.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        stop.set()
        thread.join()
        if failed:
            path.write_bytes(_FAILED + str(time.time_ns()).encode())
        else:
            path.unlink(missing_ok=True)
