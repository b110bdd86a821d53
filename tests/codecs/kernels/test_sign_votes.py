"""Signs with the mean magnitude of the message, and majority votes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.kernels import sign
from tests.codecs.kernels.kernel_vectors import (
    ALPHAS,
    any_bits,
    bits,
    check_thread_counts,
    needs_compiled,
    vectors,
)

NAN = float("nan")


def payload_for(x):
    return torch.zeros(sign.payload_bytes(len(x)), dtype=torch.uint8)


def check_encoding(x, residual):
    expected, kept_expected = payload_for(x), torch.empty(len(x))
    sign.encode_reference(x, None, None, expected)
    assert sign.encode(x).tolist() == expected.tolist()
    sign.encode_reference(x, residual, kept_expected, expected)
    kept = torch.empty(len(x))
    assert sign.encode_residual(x, residual, kept).tolist() == expected.tolist()
    assert bits(kept) == bits(kept_expected)
    assert sign.encode_residual(x, residual, residual).tolist() == expected.tolist()
    assert bits(residual) == bits(kept_expected)


@needs_compiled
@given(st.data(), st.integers(0, 2**31), st.integers(0, 3000))
def test_encode_matches_reference(data, seed, n):
    x = data.draw(vectors())
    check_encoding(x, data.draw(vectors(n=len(x))))
    check_encoding(any_bits(n, seed), any_bits(n, seed + 1))


@needs_compiled
@given(st.data(), st.integers(1, 20), ALPHAS)
def test_votes_match_reference(data, count, alpha):
    first = data.draw(vectors())
    others = [data.draw(vectors(n=len(first))) for _ in range(count - 1)]
    payloads = [sign.encode(x) for x in (first, *others)]
    out, expected = torch.full_like(first, 7.0), torch.empty_like(first)
    sign.decode_votes(payloads, out, alpha)
    sign.decode_reference(payloads, expected, alpha, False)
    assert bits(out) == bits(expected)
    sign.decode_add(payloads[0], out, alpha)
    sign.decode_reference(payloads[:1], expected, alpha, True)
    assert bits(out) == bits(expected)


@given(
    st.one_of(st.integers(1, 40), st.integers(250, 260)),
    st.integers(0, 2**31),
    st.one_of(st.integers(1, 30), st.integers(500, 1100)),
)
def test_majority_wins_and_ties_are_zero(count, seed, n):
    """Vote on signs of magnitude 1, so that the result is the sign of their sum."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (count, n), generator=generator) * 2.0 - 1.0
    out = torch.empty(n)
    sign.decode_votes([sign.encode(x) for x in signs], out, 1 / 4)
    assert torch.equal(out, signs.sum(0).sign() * (count / 4))


def test_vote_of_three_messages_has_the_sum_of_their_means():
    messages = [[2.0, -2.0, 2.0, 2.0], [-1.0, -1.0, 1.0, 0.0], [-3.0, 3.0, 3.0, -3.0]]
    payloads = [sign.encode(torch.tensor(x)) for x in messages]
    out = torch.empty(4)
    sign.decode_votes(payloads, out, 1 / 3)
    mean = (2 + 0.75 + 3) / 3
    torch.testing.assert_close(out, torch.tensor([-mean, -mean, mean, mean]))
    sign.decode_votes(payloads[:2], out, 1 / 2)
    assert out.tolist() == [0, -1.375, 1.375, 1.375]


def test_message_of_zeros_decodes_to_zeros_and_has_no_vote():
    zeros = sign.encode(torch.zeros(600))
    out = torch.full((600,), NAN)
    for decode in (sign.decode_votes, lambda *given: sign.decode_reference(*given, False)):
        decode([zeros, zeros], out, -1.0)
        assert bits(out) == [0] * 600
    negative = sign.encode(torch.full((600,), -1.5))
    sign.decode_votes([zeros, negative, zeros, zeros], out, 1 / 4)
    assert torch.equal(out, torch.full((600,), -1.5 / 4))


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_message_with_a_non_finite_value_decodes_to_nan_and_keeps_the_residual(bad):
    x = torch.ones(1000)
    x[700] = bad
    kept = torch.linspace(-1, 1, 1000)
    before = kept.clone()
    payload = sign.encode_residual(x, kept, kept)
    assert torch.equal(kept, before)
    out = torch.zeros(1000)
    sign.decode_add(payload, out)
    assert out.isnan().all()
    # also where all votes are ties
    sign.decode_votes([payload, sign.encode(-torch.ones(1000))], out)
    assert out.isnan().all()


def test_payload_has_the_documented_layout():
    x = torch.ones(512 + 17)
    x[0] = x[64] = x[130] = x[512 + 3] = x[512 + 16] = -1.0
    expected = [0x00, 0x00, 0x80, 0x3F] + [0] * (64 + 3)
    expected[4 + 0] |= 1 << 0 | 1 << 1  # byte j of 64 holds elements j, j + 64, ...
    expected[4 + 2] |= 1 << 2
    expected[68 + 0] |= 1 << 1  # byte j of the last 3 holds elements j, j + 3, ...
    expected[68 + 1] |= 1 << 5
    assert sign.encode(x).tolist() == expected


@needs_compiled
def test_payloads_do_not_depend_on_the_number_of_threads():
    n = 300_001
    x, residual = torch.randn(n), torch.randn(n)

    def compute():
        kept, out = torch.empty(n), torch.empty(n)
        payload = sign.encode_residual(x, residual, kept)
        sign.decode_votes([payload, sign.encode(x)], out, 0.5)
        return payload, kept, out

    check_thread_counts(compute)


def test_payloads_may_start_at_odd_addresses():
    x = torch.randn(777)
    message = torch.zeros(1 + sign.payload_bytes(777), dtype=torch.uint8)
    sign.encode(x, message[1:])
    assert torch.equal(message[1:], sign.encode(x))
    out, expected = torch.zeros(777), torch.zeros(777)
    sign.decode_add(message[1:], out)
    sign.decode_add(message[1:].clone(), expected)
    assert bits(out) == bits(expected)


def test_unsuitable_tensors_are_refused():
    good, payload = torch.zeros(16), torch.zeros(6, dtype=torch.uint8)
    for x, target in (
        (torch.zeros(16, dtype=torch.float64), payload),
        (torch.zeros(32)[::2], payload),
        (good, payload[1:]),
        (good, torch.zeros(6)),
    ):
        with pytest.raises(ValueError, match="must be"):
            sign.encode(x, target)
        with pytest.raises(ValueError, match="must be"):
            sign.decode_add(target, x)
