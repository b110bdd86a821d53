"""Laws of the codes of positions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs import positions
from shardlab.codecs.positions import Split
from tests.codecs.vectors import reference

CODINGS = st.sampled_from(["smaller", "elias_fano", "bitmap"])


@st.composite
def ascending(draw):
    """Draw n and positions below it: sparse or dense, with short and with long gaps."""
    n = draw(st.sampled_from([1, 5, 8, 9, 300, 4096, 70_000, 2**21 + 70, 2**31 - 1]))
    count = draw(st.integers(0, min(n, 400)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    width = max(1, int(n * draw(st.sampled_from([1.0, 0.1, 0.001]))))
    start = draw(st.integers(0, n - width))
    drawn = torch.randint(start, start + width, (count,), generator=generator)
    ends = torch.tensor(draw(st.lists(st.sampled_from([0, n - 1]), max_size=2)), dtype=torch.int64)
    return n, torch.cat([drawn, ends]).unique().to(torch.int32)


@st.composite
def coded_positions(draw):
    """Draw a number of elements, positions and a coding, but no long bitmaps."""
    n, indices = draw(ascending())
    return n, indices, draw(CODINGS) if n < 2**22 else "elias_fano"


def encoded(indices, n, coding):
    out = torch.full((Split.of(n, len(indices), coding).size,), 0xAA, dtype=torch.uint8)
    positions.encode(indices, n, coding, out)
    return out


def bits_of(stream):
    """Return the bits of bytes, lowest first."""
    return [byte >> bit & 1 for byte in stream for bit in range(8)]


@given(ascending())
def test_lower_bits_come_first_and_the_rest_in_unary(drawn):
    n, indices = drawn
    k, bits = len(indices), int(math.log2(n / len(indices))) if len(indices) else 0
    coded = bits_of(encoded(indices, n, "elias_fano").tolist())
    lower = [p >> bit & 1 for p in indices.tolist() for bit in range(bits)]
    lower += [0] * (-len(lower) % 8)
    assert coded[: len(lower)] == lower
    ones = {(p >> bits) + j for j, p in enumerate(indices.tolist())}
    upper = coded[len(lower) :]
    assert {at for at, bit in enumerate(upper) if bit} == ones
    assert len(upper) == (-(-(k + (n - 1 >> bits)) // 8) * 8 if k else 0)


@given(ascending().filter(lambda drawn: drawn[0] < 2**17))
def test_bitmap_has_a_bit_for_each_element_lowest_first(drawn):
    n, indices = drawn
    bits = bits_of(encoded(indices, n, "bitmap").tolist())
    assert [at for at, bit in enumerate(bits) if bit] == indices.tolist()
    assert len(bits) == (-(-n // 8) * 8 if len(indices) else 0)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 1025])
def test_smaller_is_the_shorter_of_both_and_fewer_positions_fit_its_bound(n):
    largest = 0
    for k in range(n + 1):
        bitmap, split = Split.of(n, k, "bitmap"), Split.of(n, k, "elias_fano")
        smaller = Split.of(n, k, "smaller")
        assert smaller == (bitmap if bitmap.size < split.size else split)
        largest = max(largest, smaller.size)
        assert largest <= positions.max_bytes(n, k, "smaller")


@given(st.integers(8, 2**31 - 1), st.data())
def test_codes_take_little_more_than_any_must(n, data):
    k = data.draw(st.integers(1, min(n // 8, 10**6)))
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    # two streams of whole bytes
    bound = choices / math.log(2) + 0.7 * k + 16 + math.log2(n)
    assert 8 * Split.of(n, k, "elias_fano").size <= bound


@given(coded_positions())
def test_positions_round_trip_with_the_bytes_of_the_reference(drawn):
    n, indices, coding = drawn
    if n > 2**22 and len(indices) > 2:
        n = 2**31 - 1 if int(indices[-1]) >= 2**22 else 2**22
    coded = encoded(indices, n, coding)
    assert torch.equal(positions.decode([coded], n, [len(indices)], coding)[0], indices)
    with reference():
        assert torch.equal(encoded(indices, n, coding), coded)
        assert torch.equal(positions.decode([coded], n, [len(indices)], coding)[0], indices)


@given(coded_positions().filter(lambda drawn: len(drawn[1]) > 0), st.data())
def test_kernel_and_reference_refuse_the_same_damage(drawn, data):
    n, indices, coding = drawn
    coded = encoded(indices, n, coding)
    coded[data.draw(st.integers(0, len(coded) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    def decoded():
        try:
            return positions.decode([coded], n, [len(indices)], coding)[0].tolist()
        except ValueError as error:
            assert "of indices are not" in str(error)
            return None

    with reference():
        expected = decoded()
    assert decoded() == expected
    if expected:
        assert expected == sorted(set(expected)) and expected[0] >= 0 and expected[-1] < n


@pytest.mark.parametrize(
    ("content", "count", "n", "coding"),
    [
        ([0b01], 2, 2, "elias_fano"),  # too few ones
        ([0b111], 2, 2, "elias_fano"),  # too many
        ([0b1001], 2, 2, "elias_fano"),  # the last position is n
        ([0b00, 0b11], 2, 4, "elias_fano"),  # the same position twice
        ([0b01, 0b11], 2, 4, "elias_fano"),  # descending
        ([0b11, 0], 2, 2, "elias_fano"),  # too long
        ([], 1, 100, "elias_fano"),
        ([0b1], 2, 1, "elias_fano"),  # more than there are
        ([0b01], 2, 3, "bitmap"),  # too few
        ([0b1001], 2, 3, "bitmap"),  # the last position is n
        ([0b11, 0], 2, 3, "bitmap"),  # too long
    ],
)
def test_damaged_codes_are_refused(content, count, n, coding):
    with pytest.raises(ValueError, match="of indices are not"):
        positions.decode([torch.tensor(content, dtype=torch.uint8)], n, [count], coding)
