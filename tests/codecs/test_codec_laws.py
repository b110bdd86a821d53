"""The laws of `shardlab.codecs.base.Codec`, for every codec."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.codecs.registry import make_codec
from shardlab.strategy.codec_table import parse_codec
from tests.codecs.codec_examples import SPECS
from tests.codecs.vectors import KEY, bits, coded, default_dtype, reference, with_ties

every_codec = pytest.mark.parametrize("spec", SPECS)
kernels_and_reference = pytest.mark.parametrize("serve", [nullcontext, reference])
NOT_FINITE = float("nan"), float("inf"), -float("inf")


@st.composite
def finite(draw: st.DrawFn) -> torch.Tensor:
    """Draw float32 [n]: few values many times, among normal numbers of one magnitude."""
    few = st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=9)
    return draw(with_ties(draw(st.integers(1, 700)), few, st.integers(-140, 57)))


def payload_has_the_documented_size(spec, x):
    codec = make_codec(spec)
    payload = codec.encode(x, KEY)
    assert payload.dtype == torch.uint8 and payload.is_contiguous()
    promised = codec.payload_bytes(x.numel())
    assert payload.numel() <= promised if codec.variable else payload.numel() == promised
    content = codec.content(x.numel(), payload)
    overhead = content.index_bytes + content.metadata_bytes
    assert 0 <= overhead <= payload.numel() and 0 <= content.elements <= x.numel()
    assert (overhead < payload.numel()) == (content.elements > 0)


def zeros_decode_to_zeros(spec, x):
    codec, zeros = make_codec(spec), torch.zeros_like(x)
    assert torch.equal(codec.decode(codec.encode(zeros, KEY), len(x), KEY), zeros)


def encoding_is_deterministic(spec, x):
    before, first = x.clone(), make_codec(spec).encode(x, KEY).clone()
    assert torch.equal(first, make_codec(spec).encode(x, KEY))
    assert torch.equal(x, before)


def biased_codec_is_a_contraction(spec, x):
    codec = make_codec(spec)
    decoded = codec.decode(codec.encode(x, KEY), x.numel(), KEY)
    error = (x.double() - decoded.double()).norm()
    assert codec.unbiased or error <= x.double().norm() * (1 + 1e-6)
    if not parse_codec(spec).one_bit:
        assert torch.equal(decoded[x == 0], torch.zeros_like(decoded[x == 0]))


def decode_add_adds_alpha_times_the_decoded_vector(spec, x):
    codec = make_codec(spec)
    payload = codec.encode(x, KEY)
    decoded = codec.decode(payload, x.numel(), KEY)
    for alpha in (1.0, -2.0):
        out = torch.ones_like(x)
        codec.decode_add(payload, out, alpha, KEY)
        torch.testing.assert_close(out, 1 + alpha * decoded, rtol=1e-6, atol=1e-6)


def payload_and_residual_sum_to_the_input(spec, x):
    codec = make_codec(spec)
    residual = torch.linspace(-1, 1, x.numel())
    corrected = x + residual
    payload = codec.encode_residual(x, residual, residual, KEY)
    sent = codec.decode(payload, x.numel(), KEY)
    # one rounding of the difference, which may be larger than the input
    lost = (sent.double() + residual.double() - corrected.double()).abs()
    assert (lost <= 2.0**-24 * residual.abs()).all()


def decode_sum_matches_decode_add(spec, x):
    codec = make_codec(spec)
    # codecs with votes decode only a single payload so
    for count, alpha in ((1, 1.0),) if parse_codec(spec).votes else ((1, 1.0), (4, 0.25)):
        keys = [KEY._replace(rank=rank) for rank in range(count)]
        payloads = [codec.encode(x / (rank + 1), keys[rank]) for rank in range(count)]
        out, expected, scale = torch.full_like(x, torch.nan), *torch.zeros(2, x.numel())
        codec.decode_sum(payloads, out, alpha, keys)
        for payload, key in zip(payloads, keys, strict=True):
            codec.decode_add(payload, expected, alpha, key)
            scale += codec.decode(payload, x.numel(), key).abs()
        assert ((out - expected).abs() <= alpha * scale * 2.0**-21 + 2.0**-140).all()


@every_codec
@given(x=finite())
@settings(max_examples=20)
def test_laws(spec, x):
    if "fp16" in spec:
        x = x.clamp(-65504, 65504)  # what is larger becomes infinity
    payload_has_the_documented_size(spec, x)
    zeros_decode_to_zeros(spec, x)
    encoding_is_deterministic(spec, x)
    biased_codec_is_a_contraction(spec, x)
    decode_add_adds_alpha_times_the_decoded_vector(spec, x)
    payload_and_residual_sum_to_the_input(spec, x)
    decode_sum_matches_decode_add(spec, x)


@kernels_and_reference
@every_codec
def test_non_finite_input_decodes_to_non_finite_and_leaves_the_residual_as_it_was(spec, serve):
    with serve():
        codec = make_codec(spec)
        for bad in NOT_FINITE:
            x, residual = torch.ones(300), torch.full((300,), 0.25)
            x[[5, 77, 78, 150, 299]] = bad  # more than a sparse codec sends
            decoded = codec.decode(codec.encode_residual(x, residual, residual, KEY), 300, KEY)
            assert not decoded.isfinite().all(), bad
            assert residual.isfinite().all(), bad
            lost = ~(x.isfinite() & decoded.isfinite())
            # what sends all has no error feedback
            assert spec == "none" or (residual[lost] == 0.25).all(), bad


@kernels_and_reference
@pytest.mark.parametrize("spec", [spec for spec in SPECS if hasattr(parse_codec(spec), "group")])
def test_a_value_that_is_not_finite_makes_its_group_nan_and_no_other(spec, serve):
    size = parse_codec(spec).group
    with serve():
        codec = make_codec(spec)
        for bad in NOT_FINITE:
            for at in (0, size - 1, 2 * size + 1, 3 * size):
                x = torch.linspace(-2, 3, 3 * size + 5)
                x[at] = bad
                decoded = codec.decode(codec.encode(x, KEY), len(x), KEY)
                inside = torch.arange(len(x)) // size == at // size
                assert torch.equal(decoded.isnan(), inside), (bad, at)
                assert decoded[~inside].isfinite().all(), (bad, at)


@every_codec
def test_payload_of_other_length_is_refused(spec):
    codec = make_codec(spec)
    payload = codec.encode(torch.full((640,), 3.0), KEY)
    with pytest.raises(ValueError, match=codec.name):
        codec.decode_add(payload, torch.zeros(320), 1.0, KEY)
    with pytest.raises(ValueError, match=codec.name):
        codec.decode_sum([payload, payload], torch.zeros(320), 1.0, [KEY, KEY])


@every_codec
def test_residual_is_the_same_in_place_and_out_of_place(spec):
    codec = make_codec(spec)
    x, residual = torch.randn(2, 700, generator=torch.Generator().manual_seed(1))
    for value in (1.0, float("nan")):
        x[77] = value
        before, in_place = residual.clone(), residual.clone()
        new_residual = torch.full_like(x, torch.nan)
        payload = codec.encode_residual(x, residual, new_residual, KEY).clone()
        assert torch.equal(residual, before)
        assert torch.equal(codec.encode_residual(x, in_place, in_place, KEY), payload)
        assert torch.equal(new_residual, in_place)


@every_codec
def test_deterministic_codec_is_unbiased_only_if_exact(spec):
    codec = make_codec(spec)
    x = torch.randn(700, generator=torch.Generator().manual_seed(1))
    payload = codec.encode(x, KEY).clone()
    if torch.equal(payload, codec.encode(x, KEY._replace(step=9))):
        assert codec.unbiased == torch.equal(codec.decode(payload, 700, KEY), x)


@kernels_and_reference
@every_codec
def test_results_do_not_depend_on_the_default_dtype(spec, serve):
    x, residual = torch.randn(2, 4001, generator=torch.Generator().manual_seed(1))
    with serve():
        expected = [bits(vector) for vector in coded(make_codec(spec), x, residual)]
        for dtype in (torch.bfloat16, torch.float64):
            with default_dtype(dtype):
                results = coded(make_codec(spec), x, residual)
            assert [bits(vector) for vector in results] == expected, dtype
