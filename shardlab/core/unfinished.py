"""Hidden folders for unfinished files; those of killed processes are removed by the next one."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yield a new folder next to `path`, for what will be renamed to it; it is removed at the end.

    The kernel locks it as long as this process and its forks live. Others of the same name that
    nobody holds are removed first.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[a-z0-9_]' * 8}"):
        _reap(left)
    folder, handle = _new(path)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def temporary(name: str) -> AbstractContextManager[Path]:
    """Return an `unfinished` folder in TMPDIR."""
    return unfinished(Path(tempfile.gettempdir(), name))


def _new(path: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        with suppress(FileNotFoundError):  # another process took it for a left one: once more
            handle = os.open(folder, os.O_RDONLY)
            if _held(handle) is not False and folder.exists():
                return folder, handle
            os.close(handle)


def _reap(folder: Path) -> None:
    with suppress(OSError):  # removed by another one, or somebody else's
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if _held(handle):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _held(handle: int) -> bool | None:
    """Lock a folder; return False when another process has, None where folders have no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # NFS
        return None
    return True
