"""Full, broken and unusual disks: one-line errors, and no files left by killed processes."""

import errno
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shardlab.activations.storage import FileStorage
from shardlab.activations.stores import FileStore
from shardlab.core.errors import UserError

STORE = """
import sys, torch
from pathlib import Path
from shardlab.core.errors import UserError
from shardlab.activations.stores import FileStore
folder = Path(sys.argv[1])
tensors = [torch.full((64, 1024), float(n)) for n in range(16)]
def keep(store):
    storeds = [store.put(tensor) for tensor in tensors]
    return all(torch.equal(store.take(a), b) for a, b in zip(storeds, tensors))
"""


def run(code, folder, before=""):
    """A script that may call `keep(store)`; `before` are commands of a shell."""
    python = shlex.join([sys.executable, "-c", STORE + textwrap.dedent(code), str(folder)])
    command = ["sh", "-c", f"{before} exec {python}"]
    if before.startswith("mount"):
        command = ["unshare", "--map-root-user", "--mount", *command]
        if subprocess.run([*command[:3], "true"], capture_output=True).returncode:
            pytest.skip("nothing may be mounted here")
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


REFUSED = """
try:
    keep(FileStore(folder))
except UserError as error:
    print(error)
"""
SPILLED = "print(keep(FileStore(folder, when_full='memory')))"


@pytest.mark.parametrize("kind", ["a small disk", "a limit for files"])
def test_full_disk_raises_one_line_or_spills_to_memory(tmp_path, kind):
    small = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} &&"
    limited = "ulimit -f 2048;"
    before = small if kind == "a small disk" else limited
    refused = run(REFUSED, tmp_path, before)
    assert refused.returncode == 0, refused.stderr
    assert refused.stdout.startswith(f"{tmp_path}: 262,144 more bytes do not fit, ")
    assert refused.stdout.count("\n") == 1
    spilled = run(SPILLED, tmp_path, before)
    assert spilled.stdout == "True\n", spilled.stderr
    assert spilled.stderr.count("host memory takes the rest") == 1


def test_file_system_without_direct_io_is_reported_once_and_used(tmp_path):
    code = "print(keep(FileStore(folder)), keep(FileStore(folder)))"
    found = run(code, tmp_path, f"mount -t ramfs ramfs {tmp_path} &&")
    assert found.stdout == "True True\n", found.stderr
    assert found.stderr == (
        f"{tmp_path}: its file system refuses direct I/O: the page cache takes part\n"
    )


def test_bytes_pass_by_the_page_cache_where_they_can(tmp_path):
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system has no direct I/O")
    storage = FileStorage(tmp_path)
    assert fcntl.fcntl(storage.file.descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_memory_as_a_disk_works_like_any_other():
    store = FileStore(Path("/dev/shm"))
    storeds = [store.put(torch.full((3000,), float(number))) for number in range(5)]
    assert [store.take(stored).mean() for stored in storeds] == [0, 1, 2, 3, 4]
    store.close()


@pytest.mark.parametrize("folder", ["/proc/shardlab", "/dev/null/folder"])
def test_folder_that_takes_no_files_is_refused(folder):
    with pytest.raises(UserError, match=f"^{folder}: no file can be made there .*another folder$"):
        FileStore(Path(folder))


def test_nothing_has_a_name_and_nothing_is_left_by_a_killed_process(tmp_path):
    code = "keep(FileStore(folder)); print('kept', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", STORE + code, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout.readline() == b"kept\n"
        assert [*tmp_path.iterdir()] == []
        child.send_signal(signal.SIGKILL)
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def left(tmp_path):
    """A store that has a tensor in its file, and room there for another."""
    store = FileStore(tmp_path)
    storeds = [store.put(torch.ones(3000)) for _ in range(4)]
    store._out.drain()
    store.drop(storeds[1])
    yield store, storeds[0]
    with suppress(OSError, UserError):
        store.close()


def test_truncated_file_raises_now_and_later(left):
    store, stored = left
    os.ftruncate(store._storage.file.descriptor, 8192)
    for call in (store.take, store.prefetch, lambda _: store.put(torch.ones(1))):
        with pytest.raises(OSError, match="could not be read: it ends too early") as told:
            call(stored)
        assert told.value.errno == errno.EIO


@pytest.mark.parametrize(
    "broken, flags, message",
    [
        ("/dev/full", os.O_RDWR, "bytes do not fit"),
        ("/dev/zero", os.O_RDONLY, "could not be written: Bad file descriptor"),
    ],
)
def test_an_error_of_the_writing_thread_is_raised_by_every_call_after_it(
    left, broken, flags, message
):
    store, stored = left
    instead = os.open(broken, flags)
    os.dup2(instead, store._storage.file.descriptor)
    os.close(instead)
    store.put(torch.ones(3000)).written.settle()
    for call in (store.take, store.prefetch, lambda _: store.put(torch.ones(1))):
        with pytest.raises((OSError, UserError), match=message):
            call(stored)
