import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.kernels import checksum as module
from shardlab.kernels.checksum import checksum, checksum_reference


def sums(operator, data):
    result = torch.zeros(2, dtype=torch.int64)
    operator(data, result)
    return result.tolist()


@given(words=st.integers(0, 300), seed=st.integers(0, 9))
def test_the_kernel_gives_the_sums_of_the_reference(words, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (8 * words,), dtype=torch.uint8, generator=generator)
    assert sums(module._checksum, data) == sums(checksum_reference, data)


def test_threads_do_not_change_the_checksum():
    data = torch.randint(0, 256, (8 * 300_001,), dtype=torch.uint8)
    alone = checksum(data)
    torch.set_num_threads(3)
    try:
        assert checksum(data) == alone
    finally:
        torch.set_num_threads(1)


def test_bytes_that_are_no_words_are_refused():
    for data in (torch.zeros(7, dtype=torch.uint8), torch.zeros(8), torch.zeros(16).byte()[::2]):
        with pytest.raises(ValueError, match="multiple of 8"):
            checksum(data)
