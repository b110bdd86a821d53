import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_vectors import ALPHAS, any_bits, bits, from_bits, vectors

from shardlab.kernels import bf16, native


@pytest.fixture(autouse=True)
def _compiled():
    if not native.available():
        pytest.skip("no compiled kernels")


def reference(x):
    payload = torch.empty(bf16.payload_bytes(len(x)), dtype=torch.uint8)
    bf16.encode_reference(x, payload)
    return payload


@given(vectors())
def test_encoding_equals_the_reference_bit_for_bit(x):
    assert bf16.encode(x).tolist() == reference(x).tolist()


@given(st.integers(0, 2**31), st.integers(0, 600))
def test_every_bit_pattern_encodes_as_the_reference_does(seed, n):
    x, kept = any_bits(n, seed), any_bits(n, seed + 1)
    assert bf16.encode(x).tolist() == reference(x).tolist()
    # in a sum of two NaN the order of operands decides whose payload survives
    kept[x.isnan() & kept.isnan()] = 0.0
    kept_expected, expected = kept.clone(), torch.empty(2 * n, dtype=torch.uint8)
    bf16.encode_residual_reference(x, kept_expected, expected)
    assert bf16.encode_residual(x, kept).tolist() == expected.tolist()
    assert bits(kept) == bits(kept_expected)


@given(st.data(), ALPHAS)
def test_decoding_equals_the_reference_bit_for_bit(data, alpha):
    x = data.draw(vectors())
    out = data.draw(vectors(n=len(x)))
    expected = out.clone()
    bf16.decode_add(bf16.encode(x), out, alpha)
    bf16.decode_add_reference(bf16.encode(x), expected, alpha)
    assert bits(out) == bits(expected)


@given(st.data())
def test_sent_and_kept_add_up_to_what_was_given_exactly(data):
    x = data.draw(vectors(specials=False))
    kept = data.draw(vectors(n=len(x), specials=False))
    wanted = x + kept
    assume(bool((wanted.abs() < 2.0**127).all()))
    sent = torch.zeros(len(x))
    bf16.decode_add(bf16.encode_residual(x, kept), sent)
    assert bits(sent + kept) == bits(wanted + 0.0)


def test_rounds_to_nearest_with_ties_to_even_and_keeps_nan():
    patterns = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFF800000]
    words = bf16.encode(torch.tensor([from_bits(p) for p in patterns])).view(torch.int16)
    assert [w & 0xFFFF for w in words.tolist()] == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80]


def test_a_residual_never_becomes_infinite():
    kept = torch.tensor([1.0, 2.0, 3.0])
    bf16.encode_residual(torch.tensor([float("inf"), float("nan"), 3.4e38]), kept)
    assert kept.tolist() == [1.0, 2.0, 3.0]


def test_memory_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="must be"):
        bf16.encode(torch.zeros(4), torch.zeros(7, dtype=torch.uint8))
    with pytest.raises(ValueError, match="must have the length"):
        bf16.encode_residual(torch.zeros(4), torch.zeros(5))
