"""Laws of the codes of positions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.kernels import indices
from tests.kernels.kernel_vectors import places


def encoded(place, n):
    out = torch.full((indices.coded_bytes(n, len(place)),), 0xAA, dtype=torch.uint8)
    indices.encode(place, n, out)
    return out


def bits_of(stream):
    """The bits of bytes, the lowest first."""
    return [byte >> bit & 1 for byte in stream for bit in range(8)]


@given(places())
def test_positions_round_trip(drawn):
    n, place = drawn
    (back,) = indices.decode([encoded(place, n)], n, [len(place)])
    assert torch.equal(back, place)


@given(places())
def test_lower_bits_come_first_and_the_rest_in_unary(drawn):
    n, place = drawn
    k, bits = len(place), int(math.log2(n / len(place))) if len(place) else 0
    coded = bits_of(encoded(place, n).tolist())
    lower = [p >> bit & 1 for p in place.tolist() for bit in range(bits)]
    lower += [0] * (-len(lower) % 8)
    assert coded[: len(lower)] == lower
    ones = {(p >> bits) + j for j, p in enumerate(place.tolist())}
    upper = coded[len(lower) :]
    assert {at for at, bit in enumerate(upper) if bit} == ones
    assert len(upper) == (-(-(k + (n - 1 >> bits)) // 8) * 8 if k else 0)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 1025])
def test_fewer_positions_take_no_more_than_the_bound(n):
    sizes = [indices.coded_bytes(n, k) for k in range(n + 1)]
    for k in range(n + 1):
        assert max(sizes[: k + 1]) <= indices.most_bytes(n, k)


@given(st.integers(8, 2**31 - 1), st.data())
def test_codes_take_little_more_than_any_must(n, data):
    k = data.draw(st.integers(1, min(n // 8, 10**6)))
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    # two streams of whole bytes
    assert 8 * indices.coded_bytes(n, k) <= choices / math.log(2) + 0.7 * k + 16 + math.log2(n)


@given(places())
def test_codes_match_reference(drawn):
    n, place = drawn
    if n > 2**22 and len(place) > 2:
        n = 2**31 - 1 if int(place[-1]) >= 2**22 else 2**22
    coded = encoded(place, n)
    out, back = torch.empty_like(coded), torch.empty_like(place)
    indices.encode_reference(place, n, out)
    assert torch.equal(out, coded)
    assert indices.decode_reference(coded, n, back)
    assert torch.equal(back, place)


@given(st.data(), st.integers(1, 60), st.sampled_from([1, 10, 777, 70_000, 2**31 - 1]))
def test_kernel_and_reference_refuse_the_same_bytes(data, count, n):
    count = min(count, n)
    size = indices.coded_bytes(n, count)
    content = data.draw(st.lists(st.integers(0, 255), min_size=size, max_size=size))
    check_refusals(torch.tensor(content, dtype=torch.uint8), n, count)


@given(places().filter(lambda drawn: len(drawn[1]) > 0), st.data())
def test_kernel_and_reference_refuse_the_same_damage(drawn, data):
    n, place = drawn
    coded = encoded(place, n)
    coded[data.draw(st.integers(0, len(coded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    check_refusals(coded, n, len(place))


def check_refusals(coded, n, count):
    back = torch.full((count,), -1, dtype=torch.int32)
    if indices.decode_reference(coded, n, back):
        assert torch.equal(indices.decode([coded], n, [count])[0], back)
        assert (back.diff() > 0).all() and back[0] >= 0 and back[-1] < n
    else:
        with pytest.raises(ValueError, match="of indices are not"):
            indices.decode([coded], n, [count])
    assert ((back >= 0) & (back < n)).all()  # addresses, whatever the bytes are


@pytest.mark.parametrize(
    ("content", "count", "n"),
    [
        ([0b01], 2, 2),  # too few ones
        ([0b111], 2, 2),  # too many
        ([0b1001], 2, 2),  # the last place is n
        ([0b00, 0b11], 2, 4),  # twice the same place
        ([0b01, 0b11], 2, 4),  # descending
        ([0b11, 0], 2, 2),  # too long
        ([], 1, 100),
        ([0b1], 2, 1),  # more than there are
    ],
)
def test_damaged_codes_are_refused(content, count, n):
    with pytest.raises(ValueError, match="of indices are not"):
        indices.decode([torch.tensor(content, dtype=torch.uint8)], n, [count])
