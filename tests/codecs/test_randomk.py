"""`randomk`: the same positions on all ranks, sums on the wire, unbiased if scaled."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from shardlab.core.errors import UserError
from shardlab.strategy.codec_table import parse_codec

KEY = MessageKey(seed=1, step=2, unit="block", rank=0)


def keys(count):
    return [KEY._replace(rank=rank) for rank in range(count)]


@given(st.integers(1, 2000), st.sampled_from([0.001, 0.1, 0.5, 1.0]), st.booleans())
def test_payloads_can_be_summed_before_they_are_decoded(n, density, scaled):
    codec = make_codec({"name": "randomk", "density": density, "scaled": scaled})
    vectors = [torch.randn(n) for _ in keys(3)]
    payloads = [codec.encode(x, key) for x, key in zip(vectors, keys(3), strict=True)]
    summed = sum(payload.view(torch.float32) for payload in payloads).view(torch.uint8)
    out = torch.empty(n)
    codec.decode_sum(payloads, out, 1.0, keys(3))
    torch.testing.assert_close(codec.decode(summed, n, KEY), out)


def test_positions_are_equal_on_all_ranks_and_differ_by_step():
    codec, x = make_codec("randomk:density=0.1"), torch.arange(1.0, 1001.0)
    drawn = [codec.encode(x, key).tolist() for key in keys(4)]
    assert all(positions == drawn[0] for positions in drawn)
    assert codec.encode(x, KEY._replace(step=3)).tolist() != drawn[0]


@pytest.mark.parametrize("values", ["fp16", "bf16", "int8", "int4"])
@given(st.integers(1, 700), st.integers(0, 2**31))
def test_values_are_a_payload_of_the_value_codec_and_add_up_with_the_residual(values, n, seed):
    codec = make_codec(f"randomk:density=0.4,values={values}")
    x, residual = torch.randn(2, n, generator=torch.Generator().manual_seed(seed))
    corrected = x + residual
    exact = make_codec("randomk:density=0.4").encode(corrected, KEY).view(torch.float32)
    payload = codec.encode_residual(x, residual, residual, KEY)
    assert torch.equal(payload, make_codec(values).encode(exact))
    sent = codec.decode(payload, n, KEY)
    torch.testing.assert_close(sent + residual, corrected)
    assert torch.equal(residual[sent == 0], corrected[sent == 0])


def test_only_float32_values_are_summed_before_they_are_decoded():
    assert make_codec("randomk").linear and parse_codec("randomk").summable
    assert not make_codec("randomk:values=int8").linear
    assert not parse_codec("randomk:values=int8").summable


def test_scaled_values_are_refused_in_a_format_that_rounds_them():
    with pytest.raises(UserError, match="values: int8 are not: remove one of them"):
        make_codec("randomk:scaled=true,values=int8")


def test_scaled_values_are_unbiased_with_the_variance_of_the_paper():
    codec, n, draws = make_codec("randomk:density=0.3,scaled=true"), 23, 5_000
    x, steps = torch.linspace(-2, 3, n), [KEY._replace(step=step) for step in range(draws)]
    decoded = torch.stack([codec.decode(codec.encode(x, key), n, key) for key in steps])
    k = round(0.3 * n)
    variance = (n / k - 1) * x.double().square()
    error = (decoded.double().mean(0) - x).abs()
    assert (error <= 4.5 * (variance / draws).sqrt() + 1e-6).all()
    measured = (decoded.double() - x).square().sum(1).mean()
    assert float(measured) == pytest.approx(float(variance.sum()), rel=0.05)
