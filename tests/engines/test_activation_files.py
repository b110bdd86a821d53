"""Full, broken and unusual disks: one-line errors, and no files left by killed processes."""

import errno
import fcntl
import os
import signal
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from shardlab.core.errors import UserError
from shardlab.engines.activation_storage import FileStorage
from shardlab.engines.activation_stores import FileStore
from tests.commands import Command, said_after, wait_for
from tests.disks import limit_files, mount


def keep(store) -> bool:
    tensors = [torch.full((64, 1024), float(number)) for number in range(16)]
    storeds = [store.put(tensor) for tensor in tensors]
    return all(map(torch.equal, map(store.take, storeds), tensors))


@pytest.fixture
def disk(tmp_path):
    """A folder to mount one on."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind", ["a small disk", "a limit for files"])
def test_full_disk_raises_one_line_or_spills_to_memory(tmp_path, disk, kind):
    small = partial(mount, "tmpfs", disk, "size=1m")
    prepare = small if kind == "a small disk" else partial(limit_files, 1 << 20)

    def both():
        try:
            with closing(FileStore(disk)) as store:  # whose threads would hold its space longer
                keep(store)
        except UserError as error:
            print(error)
        print(keep(FileStore(disk, when_full="memory")))

    lines = said_after(prepare, both, tmp_path).splitlines()
    spills, refused, kept = sorted(lines, key=lambda line: "rest" not in line)
    assert refused.startswith(f"{disk}: 262,144 more bytes do not fit, ")
    assert "host memory takes the rest" in spills and kept == "True"


def test_file_system_without_direct_io_is_reported_once_and_used(tmp_path, disk):
    said = said_after(
        partial(mount, "ramfs", disk),
        lambda: print(keep(FileStore(disk)), keep(FileStore(disk))),
        tmp_path,
    )
    assert said == (
        f"{disk}: its file system refuses direct I/O: the page cache takes part\nTrue True\n"
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


def test_nothing_has_a_name_and_nothing_is_left_by_a_killed_process(tmp_path, disk):
    def hold():
        store = FileStore(disk)
        keep(store)
        print("kept", flush=True)
        signal.pause()

    command = Command(tmp_path / "command", hold)
    wait_for(lambda: command.said() == "kept\n")
    assert [*disk.iterdir()] == []
    command.kill()
    command.leaves_nothing()
    assert [*disk.iterdir()] == []


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
        with pytest.raises(OSError, match="could not be read: it ends too early") as reported:
            call(stored)
        assert reported.value.errno == errno.EIO


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
