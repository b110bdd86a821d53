"""The laws of `shardlab.codecs.base.Codec`, for every codec."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec

SPECS = [
    "none",
    "bf16",
    "int8:group=8",
    "int8:group=128",
    "int8:rounding=stochastic",
    "int4:group=8",
    "int4:group=128",
    "int4:rounding=stochastic",
    "int4:levels=nf4",
    "qsgd:levels=1",
    "qsgd:levels=7",
    "qsgd:levels=127,group=512",
    "topk:density=0.01",
    "topk:density=0.3",
]
KEY = MessageKey(1, 2, "unit", 3)
every_codec = pytest.mark.parametrize("spec", SPECS)
every_biased_codec = pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if not make_codec(spec).unbiased]
)
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
    payload = codec.encode(as_tensor(values), KEY)
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
    first = codec.encode(vector, KEY).clone()
    assert torch.equal(first, make_codec(spec).encode(vector, KEY))
    assert torch.equal(vector, as_tensor(values))


@every_biased_codec
@given(values=vectors)
@settings(max_examples=50)
def test_decoding_is_a_contraction(spec, values):
    codec = make_codec(spec)
    x = as_tensor(values)
    decoded = codec.decode(codec.encode(x, KEY), x.numel(), KEY)
    error = (x.double() - decoded.double()).norm()
    assert error <= x.double().norm() * (1 + 1e-6)
    assert torch.equal(decoded[x == 0], torch.zeros_like(decoded[x == 0]))


@every_codec
@given(values=vectors, alpha=st.sampled_from([1.0, 0.5, -2.0]))
@settings(max_examples=50)
def test_decode_add_adds_alpha_times_the_decoded_vector(spec, values, alpha):
    codec = make_codec(spec)
    x = as_tensor(values)
    payload = codec.encode(x, KEY)
    out = torch.ones_like(x)
    codec.decode_add(payload, out, alpha, KEY)
    expected = 1 + alpha * codec.decode(payload, x.numel(), KEY)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@every_codec
@given(values=vectors)
@settings(max_examples=50)
def test_sent_and_residual_make_what_was_given(spec, values):
    codec = make_codec(spec)
    x = as_tensor(values)
    residual = torch.linspace(-1, 1, x.numel())
    given_sum = x + residual
    payload = codec.encode_residual(x, residual, residual, KEY)
    sent = codec.decode(payload, x.numel(), KEY)
    # one rounding of the difference, another of the sum here
    rounding = 2.0**-22 * (given_sum.abs() + sent.abs())
    assert ((sent + residual - given_sum).abs() <= rounding).all()


@every_codec
def test_a_payload_of_another_length_is_refused(spec):
    codec = make_codec(spec)
    payload = codec.encode(torch.ones(640), KEY)
    with pytest.raises(ValueError, match=codec.name):
        codec.decode_add(payload, torch.zeros(320), 1.0, KEY)


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
