"""Laws of the codes of positions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.kernels import indices
from shardlab.codecs.kernels.indices import Split
from tests.codecs.kernels.kernel_vectors import places

CODINGS = st.sampled_from(["smaller", "elias_fano", "bitmap"])


@st.composite
def coded_places(draw):
    """Number of elements, positions and a coding; no long bitmaps."""
    n, place = draw(places())
    return n, place, draw(CODINGS) if n < 2**22 else "elias_fano"


def encoded(place, n, coding):
    out = torch.full((Split.of(n, len(place), coding).size,), 0xAA, dtype=torch.uint8)
    indices.encode(place, n, coding, out)
    return out


def bits_of(stream):
    """The bits of bytes, the lowest first."""
    return [byte >> bit & 1 for byte in stream for bit in range(8)]


@given(coded_places())
def test_positions_round_trip(drawn):
    n, place, coding = drawn
    (back,) = indices.decode([encoded(place, n, coding)], n, [len(place)], coding)
    assert torch.equal(back, place)


@given(places())
def test_lower_bits_come_first_and_the_rest_in_unary(drawn):
    n, place = drawn
    k, bits = len(place), int(math.log2(n / len(place))) if len(place) else 0
    coded = bits_of(encoded(place, n, "elias_fano").tolist())
    lower = [p >> bit & 1 for p in place.tolist() for bit in range(bits)]
    lower += [0] * (-len(lower) % 8)
    assert coded[: len(lower)] == lower
    ones = {(p >> bits) + j for j, p in enumerate(place.tolist())}
    upper = coded[len(lower) :]
    assert {at for at, bit in enumerate(upper) if bit} == ones
    assert len(upper) == (-(-(k + (n - 1 >> bits)) // 8) * 8 if k else 0)


@given(places().filter(lambda drawn: drawn[0] < 2**17))
def test_bitmap_has_a_bit_for_each_element_lowest_first(drawn):
    n, place = drawn
    bits = bits_of(encoded(place, n, "bitmap").tolist())
    assert [at for at, bit in enumerate(bits) if bit] == place.tolist()
    assert len(bits) == (-(-n // 8) * 8 if len(place) else 0)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 1025])
def test_smaller_is_the_shorter_of_both(n):
    for k in range(n + 1):
        bitmap, split = Split.of(n, k, "bitmap"), Split.of(n, k, "elias_fano")
        expected = bitmap if bitmap.size < split.size else split
        assert Split.of(n, k, "smaller") == expected


@pytest.mark.parametrize("coding", ["smaller", "elias_fano", "bitmap"])
@pytest.mark.parametrize("n", [1, 2, 7, 100, 1025])
def test_fewer_positions_take_no_more_than_the_bound(n, coding):
    sizes = [Split.of(n, k, coding).size for k in range(n + 1)]
    for k in range(n + 1):
        assert max(sizes[: k + 1]) <= indices.most_bytes(n, k, coding)


@given(st.integers(8, 2**31 - 1), st.data())
def test_codes_take_little_more_than_any_must(n, data):
    k = data.draw(st.integers(1, min(n // 8, 10**6)))
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    # two streams of whole bytes
    most = choices / math.log(2) + 0.7 * k + 16 + math.log2(n)
    assert 8 * Split.of(n, k, "elias_fano").size <= most


@given(coded_places())
def test_codes_match_reference(drawn):
    n, place, coding = drawn
    if n > 2**22 and len(place) > 2:
        n = 2**31 - 1 if int(place[-1]) >= 2**22 else 2**22
    coded = encoded(place, n, coding)
    out, back = torch.empty_like(coded), torch.empty_like(place)
    indices.encode_reference(place, n, coding, out)
    assert torch.equal(out, coded)
    assert indices.decode_reference(coded, n, coding, back)
    assert torch.equal(back, place)


@given(st.data(), st.integers(1, 60), st.sampled_from([1, 10, 777, 70_000, 2**31 - 1]), CODINGS)
def test_kernel_and_reference_refuse_the_same_bytes(data, count, n, coding):
    count = min(count, n)
    coding = coding if n < 1000 else "elias_fano"
    size = Split.of(n, count, coding).size
    content = data.draw(st.lists(st.integers(0, 255), min_size=size, max_size=size))
    check_refusals(torch.tensor(content, dtype=torch.uint8), n, count, coding)


@given(coded_places().filter(lambda drawn: len(drawn[1]) > 0), st.data())
def test_kernel_and_reference_refuse_the_same_damage(drawn, data):
    n, place, coding = drawn
    coded = encoded(place, n, coding)
    coded[data.draw(st.integers(0, len(coded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    check_refusals(coded, n, len(place), coding)


def check_refusals(coded, n, count, coding):
    back = torch.full((count,), -1, dtype=torch.int32)
    if indices.decode_reference(coded, n, coding, back):
        assert torch.equal(indices.decode([coded], n, [count], coding)[0], back)
        assert (back.diff() > 0).all() and back[0] >= 0 and back[-1] < n
    else:
        with pytest.raises(ValueError, match="of indices are not"):
            indices.decode([coded], n, [count], coding)
    assert ((back >= 0) & (back < n)).all()  # addresses, whatever the bytes are


@pytest.mark.parametrize(
    ("content", "count", "n", "coding"),
    [
        ([0b01], 2, 2, "elias_fano"),  # too few ones
        ([0b111], 2, 2, "elias_fano"),  # too many
        ([0b1001], 2, 2, "elias_fano"),  # the last place is n
        ([0b00, 0b11], 2, 4, "elias_fano"),  # twice the same place
        ([0b01, 0b11], 2, 4, "elias_fano"),  # descending
        ([0b11, 0], 2, 2, "elias_fano"),  # too long
        ([], 1, 100, "elias_fano"),
        ([0b1], 2, 1, "elias_fano"),  # more than there are
        ([0b01], 2, 3, "bitmap"),  # too few
        ([0b1001], 2, 3, "bitmap"),  # the last place is n
        ([0b11, 0], 2, 3, "bitmap"),  # too long
    ],
)
def test_damaged_codes_are_refused(content, count, n, coding):
    with pytest.raises(ValueError, match="of indices are not"):
        indices.decode([torch.tensor(content, dtype=torch.uint8)], n, [count], coding)
