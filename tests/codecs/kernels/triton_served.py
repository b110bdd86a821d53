"""Kernels of Triton's interpreter in the place of the compiled ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from shardlab.codecs.kernels import native


@contextmanager
def on_triton() -> Iterator[None]:
    """Take vectors in host memory for those of a GPU in all operators while the block runs."""
    kernels = native._triton()
    assert kernels is not None
    with (
        mock.patch.object(native, "compiled", lambda values: False),
        mock.patch.object(native, "triton_kernels", lambda values: kernels),
    ):
        yield


@contextmanager
def on_reference() -> Iterator[None]:
    """Run all operators in PyTorch while the block runs."""
    with mock.patch.object(native, "compiled", lambda values: False):
        yield
