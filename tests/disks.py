"""Disks for forked processes that are as good as full."""

import resource


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
