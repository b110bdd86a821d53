"""Laws of the checksum of a device, and its kernels in Triton's interpreter."""

import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.codecs.kernels.triton_served import on_reference, on_triton

from shardlab.codecs.kernels.checksum import write_header
from tests.ranks import on_ranks

IDENTITY = 0xFEDCBA98


def header_of(words):
    header = torch.zeros(1, dtype=torch.int64)
    write_header(words, IDENTITY, header)
    return int(header) % 2**64


def any_words(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)


def mixed(plain, weighted):
    """The finalizer of MurmurHash3, with the weighted sum after its first product."""
    word = ((plain ^ plain >> 33) * 0xFF51AFD7ED558CCD + weighted) % 2**64
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
    return word ^ word >> 33


@given(n=st.integers(0, 300), seed=st.integers(0, 9))
def test_headers_are_what_the_format_says(n, seed):
    words = any_words(n, seed)
    rows = -(-n // 32)
    plain = sum(words.tolist()) % 2**64
    weighted = sum((rows - i // 32) * number for i, number in enumerate(words.tolist())) % 2**64
    assert header_of(words) == mixed(plain, weighted) % 2**32 << 32 | IDENTITY


@pytest.mark.parametrize("n", [1, 5, 32, 33, 100])
def test_a_flipped_bit_of_any_word_changes_the_checksum(n):
    """Also the highest bits, which a product moves out of the word."""
    words = any_words(n, n)
    data, before = words.view(torch.uint8), header_of(words)
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert header_of(words) != before, (place, bit)
            data[place] ^= 1 << bit


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="on a GPU tests/codecs/test_devices.py runs the kernels themselves",
)
@given(n=st.integers(0, 3000), seed=st.integers(0, 9))
@example(n=1 << 20 | 5, seed=0)  # more blocks than are added up at once
@settings(max_examples=20)
def test_kernels_of_triton_write_the_same_header(n, seed):
    pytest.importorskip("triton")
    words, found = any_words(n, seed), []
    for where in (on_triton, on_reference):
        with where():
            found.append(header_of(words))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 33, 1 << 20])
@on_ranks(1)  # a process that has used CUDA could not fork ranks for other tests
def test_headers_of_a_gpu_are_those_of_the_reference(n):
    words = any_words(n, n)
    header = torch.zeros(1, dtype=torch.int64, device="cuda")
    write_header(words.cuda(), IDENTITY, header)
    assert int(header) % 2**64 == header_of(words)
