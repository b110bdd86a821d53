"""Host memory of ranks: what a step frees stays with the process for the next one."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""parameters of mallopt(3)"""
_LARGEST_IN_HEAP = 32 << 20
"""bytes: the limit up to which glibc adapts its thresholds to what a process frees"""
_KEPT = 1 << 30


def keep_freed_memory() -> None:
    """Let malloc keep freed memory of blocks up to 32 MiB, 1 GiB at most.

    By default glibc gives memory back to the kernel beyond thresholds that follow the largest block
    freed so far: some ranks of a run fault in thousands of pages in every step and others none, by
    the order of what they freed. On a GPU PyTorch's caching allocator does the same.

    Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_TRIM_THRESHOLD, _KEPT)
