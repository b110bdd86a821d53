import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.kernels import indices
from tests.kernels.kernel_vectors import places

CODINGS = st.sampled_from(["smaller", "bitmap", "varint"])


def buffer(n, k, coding):
    return torch.zeros(indices.most_bytes(n, k, coding), dtype=torch.uint8)


def encoded(place, n, coding):
    out = buffer(n, len(place), coding)
    return out[: indices.encode(place, n, coding, out)]


def leb128(gap):
    more = []
    while gap >= 128:
        more.append(gap % 128 + 128)
        gap //= 128
    return [*more, gap]


def affordable(n, coding):
    return n < 2**22 or coding == "varint"


@given(places(), CODINGS)
def test_positions_round_trip(drawn, coding):
    n, place = drawn
    if not affordable(n, coding):
        coding = "varint"
    coded = encoded(place, n, coding)
    (back,) = indices.decode([coded], n, [len(place)], coding)
    assert torch.equal(back, place)


@given(places())
def test_varint_is_leb128_of_the_gaps(drawn):
    n, place = drawn
    gaps = torch.diff(place.long(), prepend=torch.tensor([-1])) - 1
    expected = [byte for gap in gaps.tolist() for byte in leb128(gap)]
    assert encoded(place, n, "varint").tolist() == expected


@given(places().filter(lambda drawn: drawn[0] < 2**17))
def test_bitmap_has_a_bit_for_each_element_lowest_first(drawn):
    n, place = drawn
    expected = [0] * ((n + 7) // 8)
    for i in place.tolist():
        expected[i // 8] |= 1 << i % 8
    assert encoded(place, n, "bitmap").tolist() == expected


@given(places().filter(lambda drawn: drawn[0] < 2**22))
def test_smaller_coding_is_chosen_and_bitmap_on_ties(drawn):
    n, place = drawn
    sizes = {coding: len(encoded(place, n, coding)) for coding in ("bitmap", "varint")}
    winner = "varint" if sizes["varint"] < sizes["bitmap"] else "bitmap"
    assert torch.equal(encoded(place, n, "smaller"), encoded(place, n, winner))


@given(places(), CODINGS)
def test_codings_match_reference(drawn, coding):
    n, place = drawn
    if not affordable(n, coding):
        coding = "varint"
    coded = encoded(place, n, coding)
    out, size = buffer(n, len(place), coding), torch.empty(1, dtype=torch.int64)
    indices.encode_reference(place, n, coding, out, size)
    assert torch.equal(out[: int(size)], coded)
    back = torch.empty_like(place)
    assert indices.decode_reference(coded, n, coding, back)
    assert torch.equal(back, place)


@given(
    st.lists(st.sampled_from([0, 1, 5, 127, 128, 129, 200, 255]), max_size=200),
    st.integers(0, 60),
    st.sampled_from([1, 10, 777, 70_000, 2**31 - 1]),
    CODINGS,
)
def test_kernel_and_reference_refuse_the_same_bytes(content, count, n, coding):
    coded = torch.tensor(content, dtype=torch.uint8)
    if count == 60:
        count = sum(byte < 128 for byte in content)
    back = torch.full((count,), -1, dtype=torch.int32)
    is_bitmap = coding != "varint" and len(content) == (n + 7) // 8
    good = (is_bitmap or coding != "bitmap") and indices.decode_reference(coded, n, coding, back)
    if good:
        assert torch.equal(indices.decode([coded], n, [count], coding)[0], back)
        assert encoded(back, n, "bitmap" if is_bitmap else "varint").tolist() == content
    else:
        with pytest.raises(ValueError, match="of indices are not"):
            indices.decode([coded], n, [count], coding)


@pytest.mark.parametrize(
    ("content", "count", "n"),
    [
        ([0, 5], 2, 6),  # the last place is n
        ([0, 5], 1, 100),  # too many
        ([0, 5], 3, 100),  # too few
        ([0, 0x80], 2, 100),  # cut off
        ([0x80, 0x00], 1, 100),  # two bytes where one would do
        ([0xFF] * 5 + [1], 1, 2**31 - 1),  # six bytes
        ([0xFF, 0xFF, 0xFF, 0xFF, 0x7F], 1, 2**31 - 1),  # more than 31 bits
        ([], 1, 100),
    ],
)
def test_damaged_gaps_are_refused(content, count, n):
    with pytest.raises(ValueError, match="of indices are not"):
        indices.decode([torch.tensor(content, dtype=torch.uint8)], n, [count], "varint")


@given(st.integers(1, 3000), st.data(), CODINGS)
def test_size_is_at_most_the_bound(n, data, coding):
    k = data.draw(st.integers(1, n))
    # gaps just long enough for a second byte, as many as there are
    long = min(k, (n - k) // 128)
    gaps = torch.tensor([128] * long + [0] * (k - long))
    place = (gaps + 1).cumsum(0).sub(1).to(torch.int32)
    size = len(encoded(place, n, coding))
    assert size <= indices.most_bytes(n, k, coding)
    if coding == "varint":
        assert size == indices.most_bytes(n, k, coding)
