"""The laws of `shardlab.codecs.base.Codec`, for every codec."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shardlab.codecs.registry import make_codec

SPECS = [
    "none",
    "bf16",
    "int8:group=8",
    "int8:group=128",
    "sign",
    "efsign:group=8",
    "efsign:group=512",
    "onebit:group=8",
    "onebit:group=512",
    "topk:density=0.01",
    "topk:density=0.3",
]
ONE_BIT = ("sign", "efsign", "onebit")
"""codecs without a code for zero"""
every_codec = pytest.mark.parametrize("spec", SPECS)
vectors = st.integers(1, 700).flatmap(
    lambda n: arrays(np.float32, n, elements=st.floats(-(2.0**60), 2.0**60, width=32))
)


def as_tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy())


@every_codec
@given(values=vectors)
@settings(max_examples=50)
def test_payload_is_as_long_as_promised(spec, values):
    codec = make_codec(spec)
    payload = codec.encode(as_tensor(values))
    assert payload.dtype == torch.uint8 and payload.is_contiguous()
    assert payload.numel() == codec.payload_bytes(values.size)
    content = codec.content(values.size, payload)
    overhead = content.index_bytes + content.metadata_bytes
    assert 0 <= overhead < payload.numel() and 1 <= content.elements <= values.size


@every_codec
@given(values=vectors)
@settings(max_examples=50)
def test_encoding_is_a_function_of_the_vector(spec, values):
    codec = make_codec(spec)
    vector = as_tensor(values)
    first = codec.encode(vector).clone()
    assert torch.equal(first, make_codec(spec).encode(vector))
    assert torch.equal(vector, as_tensor(values))


@every_codec
@given(values=vectors)
@settings(max_examples=50)
def test_decoding_is_a_contraction(spec, values):
    codec = make_codec(spec)
    x = as_tensor(values)
    decoded = codec.decode(codec.encode(x), x.numel())
    error = (x.double() - decoded.double()).norm()
    assert error <= x.double().norm() * (1 + 1e-6)
    if codec.name not in ONE_BIT:
        assert torch.equal(decoded[x == 0], torch.zeros_like(decoded[x == 0]))


@every_codec
def test_a_vector_of_zeros_decodes_to_zeros(spec):
    codec = make_codec(spec)
    assert torch.equal(codec.decode(codec.encode(torch.zeros(600)), 600), torch.zeros(600))


@every_codec
@given(values=vectors, alpha=st.sampled_from([1.0, 0.5, -2.0]))
@settings(max_examples=50)
def test_the_sum_of_payloads_is_the_sum_of_what_they_decode_to(spec, values, alpha):
    codec = make_codec(spec)
    x = as_tensor(values)
    n = x.numel()
    # of codecs that vote only a single payload decodes so
    vectors = [x] if codec.votes else [x, -0.5 * x, x.roll(1)]
    payloads = [codec.encode(vector) for vector in vectors]
    out = torch.full_like(x, 7.0)
    codec.decode_sum(payloads, out, alpha)
    expected = alpha * sum(codec.decode(payload, n).double() for payload in payloads)
    scale = sum(codec.decode(payload, n).abs().double() for payload in payloads)
    assert ((out - expected).abs() <= abs(alpha) * scale * 2.0**-21 + 2.0**-140).all()


@every_codec
@given(values=vectors, alpha=st.sampled_from([1.0, 0.5, -2.0]))
@settings(max_examples=50)
def test_decode_add_adds_alpha_times_the_decoded_vector(spec, values, alpha):
    codec = make_codec(spec)
    x = as_tensor(values)
    payload = codec.encode(x)
    out = torch.ones_like(x)
    codec.decode_add(payload, out, alpha)
    expected = 1 + alpha * codec.decode(payload, x.numel())
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@every_codec
@given(values=vectors)
@settings(max_examples=50)
def test_sent_and_residual_make_what_was_given(spec, values):
    codec = make_codec(spec)
    x = as_tensor(values)
    residual = torch.linspace(-1, 1, x.numel())
    given_sum = x + residual
    payload = codec.encode_residual(x, residual, residual)
    sent = codec.decode(payload, x.numel())
    # one rounding of the difference, which may be larger than what was given
    lost = (sent.double() + residual.double() - given_sum.double()).abs()
    assert (lost <= 2.0**-24 * residual.abs()).all()


@every_codec
def test_a_payload_of_another_length_is_refused(spec):
    codec = make_codec(spec)
    payload = codec.encode(torch.ones(640))
    with pytest.raises(ValueError, match=codec.name):
        codec.decode_add(payload, torch.zeros(320))


def test_bf16_is_torchs_own_rounding():
    x = torch.randn(1001)
    codec = make_codec("bf16")
    assert torch.equal(codec.decode(codec.encode(x), 1001), x.bfloat16().float())


def test_int8_error_is_at_most_half_a_step():
    x = torch.randn(1000)
    codec = make_codec("int8:group=128")
    error = (codec.decode(codec.encode(x), 1000) - x).abs()
    for part, errors in zip(x.split(128), error.split(128), strict=True):
        step = part.abs().max() / 127 * (1 + 2**-7)
        assert errors.max() <= step / 2 * (1 + 1e-5)


def test_topk_keeps_the_largest_and_breaks_ties_by_index():
    codec = make_codec("topk:density=0.4")
    x = torch.tensor([1.0, -3.0, 1.0, 2.0, 1.0])
    assert codec.decode(codec.encode(x), 5).tolist() == [0, -3.0, 0, 2.0, 0]
    ties = torch.ones(5)
    assert codec.decode(codec.encode(ties), 5).tolist() == [1.0, 1.0, 0, 0, 0]
