import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_vectors import ALPHAS, any_bits, bits, vectors

from shardlab.kernels import int8, native

GROUPS = st.sampled_from([1, 3, 8, 16, 128, 1000, 5000])


@pytest.fixture(autouse=True)
def _compiled():
    if not native.available():
        pytest.skip("no compiled kernels")


def decoded(payload, n, group):
    out = torch.zeros(n)
    int8.decode_add(payload, group, out)
    return out


@given(vectors(), GROUPS)
def test_encoding_equals_the_reference_bit_for_bit(x, group):
    expected = torch.empty(int8.payload_bytes(len(x), group), dtype=torch.uint8)
    int8.encode_reference(x, group, expected)
    assert int8.encode(x, group).tolist() == expected.tolist()


@given(st.data(), GROUPS)
def test_encoding_with_residual_equals_the_reference_bit_for_bit(data, group):
    x = data.draw(vectors())
    kept = data.draw(vectors(n=len(x)))
    kept_expected = kept.clone()
    expected = torch.empty(int8.payload_bytes(len(x), group), dtype=torch.uint8)
    int8.encode_residual_reference(x, kept_expected, group, expected)
    assert int8.encode_residual(x, kept, group).tolist() == expected.tolist()
    assert bits(kept) == bits(kept_expected)


@given(st.data(), GROUPS, ALPHAS)
def test_decoding_equals_the_reference_bit_for_bit(data, group, alpha):
    x = data.draw(vectors())
    out = data.draw(vectors(n=len(x)))
    expected = out.clone()
    payload = int8.encode(x, group)
    int8.decode_add(payload, group, out, alpha)
    int8.decode_add_reference(payload, group, expected, alpha)
    assert bits(out) == bits(expected)


@given(st.integers(0, 2**31), st.integers(0, 600), GROUPS)
def test_every_bit_pattern_encodes_as_the_reference_does(seed, n, group):
    x, kept = any_bits(n, seed), any_bits(n, seed + 1)
    kept_expected, expected = kept.clone(), torch.empty(int8.payload_bytes(n, group)).byte()
    int8.encode_residual_reference(x, kept_expected, group, expected)
    assert int8.encode_residual(x, kept, group).tolist() == expected.tolist()
    assert bits(kept) == bits(kept_expected)


@given(st.data(), GROUPS)
def test_sent_and_kept_add_up_to_what_was_given_exactly(data, group):
    x = data.draw(vectors(specials=False))
    kept = data.draw(vectors(n=len(x), specials=False))
    given_ = x + kept
    assume(bool((given_.abs() < 2.0**126).all()))
    payload = int8.encode_residual(x, kept, group)
    assert bits(decoded(payload, len(x), group) + kept) == bits(given_ + 0.0)


@given(vectors(specials=False), GROUPS)
def test_no_element_is_off_by_more_than_half_a_step(x, group):
    for start in range(0, len(x), group):
        part = x[start : start + group]
        step = max(part.abs().max().item() / 127, 2.0**-126) * (1 + 2**-7)
        error = (decoded(int8.encode(part, group), len(part), group) - part).abs().max()
        assert error.item() <= step / 2 * (1 + 2**-20)


def test_a_group_with_a_nan_or_infinity_or_huge_value_decodes_to_nan_alone():
    for bad in (float("nan"), float("inf"), -float("inf"), 2.0**127, -3e38):
        x = torch.ones(24)
        x[9] = bad
        kept = torch.full((24,), 0.25)
        out = decoded(int8.encode_residual(x, kept, 8), 24, 8)
        assert out[8:16].isnan().all()
        assert out[:8].isfinite().all() and out[16:].isfinite().all()
        assert kept[8:16].tolist() == [0.25] * 8


def test_the_payload_is_laid_out_as_documented():
    x = torch.tensor([127.0, -63.5, 0.5, 1.5, 0.0, 0.0, 0.0, 0.0, 254.0])
    payload = int8.encode(x, 4)
    assert payload.tolist() == [
        *(0x80, 0x3F, 0x00, 0x00, 0x00, 0x40),  # bfloat16 1, 0 and 2
        *(127, 256 - 64, 0, 2, 0, 0, 0, 0, 127),  # ties to even
    ]


def test_payloads_may_start_at_odd_addresses():
    x = torch.randn(77)
    message = torch.zeros(1 + int8.payload_bytes(77, 16), dtype=torch.uint8)
    int8.encode(x, 16, message[1:])
    assert torch.equal(message[1:], int8.encode(x, 16))
    assert bits(decoded(message[1:], 77, 16)) == bits(decoded(message[1:].clone(), 77, 16))


@pytest.mark.parametrize(
    ("x", "group", "payload"),
    [
        (torch.zeros(8, dtype=torch.float64), 8, torch.zeros(10).byte()),
        (torch.zeros(16)[::2], 8, torch.zeros(10).byte()),
        (torch.zeros(8), 8, torch.zeros(9).byte()),
        (torch.zeros(8), 8, torch.zeros(10)),
        (torch.zeros(8), 0, torch.zeros(10).byte()),
    ],
)
def test_memory_that_does_not_fit_is_refused(x, group, payload):
    with pytest.raises(ValueError, match="must be"):
        torch.ops.shardlab.int8_encode(x, group, payload)
    with pytest.raises(ValueError, match="must be"):
        torch.ops.shardlab.int8_decode_add(payload, group, x, 1.0)
