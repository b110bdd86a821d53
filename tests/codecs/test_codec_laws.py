"""The laws of `shardlab.codecs.base.Codec`, for every codec."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec, spec_of
from tests.codecs.codec_examples import SPECS

KEY = MessageKey(seed=1, step=2, unit="block", rank=3)
every_codec = pytest.mark.parametrize("spec", SPECS)
vectors = st.integers(1, 700).flatmap(
    lambda n: arrays(np.float32, n, elements=st.floats(-(2.0**60), 2.0**60, width=32))
)


def as_tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy())


@every_codec
@given(values=vectors)
@settings(max_examples=50)
def test_payload_has_the_documented_size(spec, values):
    codec = make_codec(spec)
    payload = codec.encode(as_tensor(values), KEY)
    assert payload.dtype == torch.uint8 and payload.is_contiguous()
    promised = codec.payload_bytes(values.size)
    assert payload.numel() <= promised if codec.variable else payload.numel() == promised
    content = codec.content(values.size, payload)
    overhead = content.index_bytes + content.metadata_bytes
    assert 0 <= overhead <= payload.numel() and 0 <= content.elements <= values.size
    assert (overhead < payload.numel()) == (content.elements > 0)


@every_codec
@given(values=vectors)
@settings(max_examples=50)
def test_encoding_is_deterministic(spec, values):
    codec = make_codec(spec)
    vector = as_tensor(values)
    first = codec.encode(vector, KEY).clone()
    assert torch.equal(first, make_codec(spec).encode(vector, KEY))
    assert torch.equal(vector, as_tensor(values))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not make_codec(spec).unbiased])
@given(values=vectors)
@settings(max_examples=50)
def test_biased_codec_is_a_contraction(spec, values):
    codec = make_codec(spec)
    x = as_tensor(values)
    decoded = codec.decode(codec.encode(x, KEY), x.numel(), KEY)
    error = (x.double() - decoded.double()).norm()
    assert error <= x.double().norm() * (1 + 1e-6)
    if not spec_of(spec).one_bit:
        assert torch.equal(decoded[x == 0], torch.zeros_like(decoded[x == 0]))


@every_codec
def test_zeros_decode_to_zeros(spec):
    codec = make_codec(spec)
    payload = codec.encode(torch.zeros(600), KEY)
    assert torch.equal(codec.decode(payload, 600, KEY), torch.zeros(600))


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
def test_payload_and_residual_sum_to_the_input(spec, values):
    codec = make_codec(spec)
    x = as_tensor(values)
    residual = torch.linspace(-1, 1, x.numel())
    wanted = x + residual
    payload = codec.encode_residual(x, residual, residual, KEY)
    sent = codec.decode(payload, x.numel(), KEY)
    # one rounding of the difference, which may be larger than the input
    lost = (sent.double() + residual.double() - wanted.double()).abs()
    assert (lost <= 2.0**-24 * residual.abs()).all()


@every_codec
@given(values=vectors, count=st.integers(1, 5), alpha=st.sampled_from([1.0, 0.25]))
@settings(max_examples=25)
def test_decode_sum_matches_decode_add(spec, values, count, alpha):
    codec = make_codec(spec)
    # codecs with votes decode only a single payload so
    count = 1 if codec.votes else count
    x = as_tensor(values)
    keys = [KEY._replace(rank=rank) for rank in range(count)]
    payloads = [codec.encode(x / (rank + 1), keys[rank]) for rank in range(count)]
    out, expected = torch.full_like(x, torch.nan), torch.zeros_like(x)
    codec.decode_sum(payloads, out, alpha, keys)
    for payload, key in zip(payloads, keys, strict=True):
        codec.decode_add(payload, expected, alpha, key)
    scale = sum(codec.decode(p, x.numel(), k).abs() for p, k in zip(payloads, keys, strict=True))
    assert ((out - expected).abs() <= alpha * scale * 2.0**-21 + 2.0**-140).all()


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_decodes_to_non_finite_and_leaves_residual_finite(spec, bad):
    codec = make_codec(spec)
    x, residual = torch.ones(300), torch.full((300,), 0.25)
    x[77] = bad
    decoded = codec.decode(codec.encode_residual(x, residual, residual, KEY), 300, KEY)
    assert not decoded.isfinite().all()
    assert residual.isfinite().all()


@every_codec
def test_payload_of_other_length_is_refused(spec):
    codec = make_codec(spec)
    payload = codec.encode(torch.full((640,), 3.0), KEY)
    with pytest.raises(ValueError, match=codec.name):
        codec.decode_add(payload, torch.zeros(320), 1.0, KEY)
    with pytest.raises(ValueError, match=codec.name):
        codec.decode_sum([payload, payload], torch.zeros(320), 1.0, [KEY, KEY])


def test_bf16_matches_torch():
    x = torch.randn(1001)
    codec = make_codec("bf16")
    assert torch.equal(codec.decode(codec.encode(x), 1001), x.bfloat16().float())


def test_topk_keeps_the_largest_and_breaks_ties_by_index():
    codec = make_codec("topk:density=0.4")
    x = torch.tensor([1.0, -3.0, 1.0, 2.0, 1.0])
    assert codec.decode(codec.encode(x), 5).tolist() == [0, -3.0, 0, 2.0, 0]
    ties = torch.ones(5)
    assert codec.decode(codec.encode(ties), 5).tolist() == [1.0, 1.0, 0, 0, 0]


@every_codec
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_residual_is_the_same_in_place_and_out_of_place(spec, value):
    codec = make_codec(spec)
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, 700, generator=generator)
    x[77] = value
    before, kept, place = residual.clone(), torch.full_like(x, torch.nan), residual.clone()
    payload = codec.encode_residual(x, residual, kept, KEY).clone()
    assert torch.equal(residual, before)
    assert torch.equal(codec.encode_residual(x, place, place, KEY), payload)
    assert torch.equal(kept, place)


@every_codec
def test_deterministic_codec_is_unbiased_only_if_exact(spec):
    codec = make_codec(spec)
    x = torch.randn(700, generator=torch.Generator().manual_seed(1))
    payload = codec.encode(x, KEY).clone()
    if torch.equal(payload, codec.encode(x, KEY._replace(step=9))):
        assert codec.unbiased == torch.equal(codec.decode(payload, 700, KEY), x)


@every_codec
def test_default_alpha_is_one(spec):
    codec = make_codec(spec)
    payload = codec.encode(torch.randn(700, generator=torch.Generator().manual_seed(1)), KEY)
    said, unsaid = torch.zeros(2, 700)
    codec.decode_add(payload, said, 1.0, KEY)
    codec.decode_add(payload, unsaid, key=KEY)
    assert torch.equal(said, unsaid) and said.any()
    codec.decode_sum([payload], said, 1.0, [KEY])
    codec.decode_sum([payload], unsaid, keys=[KEY])
    assert torch.equal(said, unsaid) and said.any()
