"""`topk` and `threshold`: selection, payloads and residuals."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.codecs.registry import make_codec
from shardlab.strategy.codec_options import Values
from tests.codecs.vectors import KEY

INDICES = ["smaller", "elias_fano", "bitmap"]
every_value_codec = pytest.mark.parametrize("values", get_args(Values))


@every_value_codec
@pytest.mark.parametrize("name", ["topk:density=0.1", "threshold:threshold=1,cap=0.2"])
@settings(max_examples=20)
@given(st.sampled_from(INDICES), st.integers(1, 700), st.integers(0, 2**31), st.integers(-20, 8))
def test_payload_and_residual_sum_to_the_input(name, values, indices, n, seed, power):
    codec = make_codec(f"{name},values={values},indices={indices}")
    x, residual = torch.randn(2, n, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    corrected = x + residual
    sent = codec.decode(codec.encode_residual(x, residual, residual, KEY), n, KEY)
    torch.testing.assert_close(sent + residual, corrected, rtol=1e-6, atol=1e-7 * 2.0**power)
    if values == "fp32":
        assert torch.equal(sent + residual, corrected)
    assert torch.equal(residual[sent == 0], corrected[sent == 0])


@every_value_codec
def test_payload_begins_with_the_payload_of_the_value_codec(values):
    x = torch.randn(5000)
    payload = make_codec(f"topk:density=0.1,values={values}").encode(x, KEY)
    indices = torch.topk(x.abs(), 500).indices.sort().values
    expected = make_codec({"fp32": "none"}.get(values, values)).encode(x[indices], KEY)
    assert torch.equal(payload[: expected.numel()], expected)


@given(st.lists(st.sampled_from([0.0, 0.5, -1.0, 1.0, 1.5, -9.0]), min_size=1, max_size=400))
def test_threshold_sends_what_reaches_it_and_at_the_cap_the_largest(values):
    x = torch.tensor(values)
    codec = make_codec("threshold:threshold=1,cap=0.3")
    cap = max(1, round(0.3 * len(x)))
    reached = x.abs() >= 1
    expected = torch.where(reached, x, 0.0)
    if int(reached.sum()) > cap:
        expected = torch.zeros_like(x)
        indices = x.abs().sort(descending=True, stable=True).indices[:cap]
        expected[indices] = x[indices]
    payload = codec.encode(x)
    assert torch.equal(codec.decode(payload, len(x)), expected)
    assert codec.content(len(x), payload).elements == int(expected.count_nonzero())


def test_threshold_sends_a_count_alone_where_nothing_reaches_it():
    codec = make_codec("threshold:threshold=10")
    payload = codec.encode(torch.ones(1000))
    assert payload.tolist() == [0, 0, 0, 0]
    out = torch.full((1000,), 5.0)
    codec.decode_sum([payload, payload], out)
    assert torch.equal(out, torch.zeros(1000))


def test_content_tells_values_indices_and_scales_apart():
    codec = make_codec("threshold:threshold=0.000001,cap=0.1,values=int8")
    payload = codec.encode(torch.randn(8000))
    content = codec.content(8000, payload)
    # positions: 3 bits of each, and 800 + 7999 // 8 bits
    assert content == (800, 300 + 225, 4 + 2 * 7)
    assert payload.numel() == 800 + sum(content[1:])


def test_the_indices_of_one_percent_take_about_a_byte_each():
    codec = make_codec("topk:density=0.01")
    payload = codec.encode(torch.randn(1_000_000))
    assert codec.content(1_000_000, payload).index_bytes == 10_703
    assert payload.numel() == codec.payload_bytes(1_000_000) and not codec.variable


@pytest.mark.parametrize(
    "spec", ["topk:density=0.05", "threshold:threshold=2", "topk:indices=bitmap"]
)
def test_damaged_payloads_are_refused_by_name_before_anything_is_added(spec):
    codec = make_codec(spec)
    payload = codec.encode(torch.randn(4000))
    short, last, count = payload[:-1], payload.clone(), payload.clone()
    last[-1] |= 0xFF
    count[:4] = torch.tensor([255, 0, 0, 0])
    damaged = [short, last, payload[:3]] + ([count] if codec.name == "threshold" else [])
    for damaged_payload in damaged:
        out = torch.zeros(4000)
        with pytest.raises(ValueError, match=codec.name):
            codec.decode_sum([payload, damaged_payload], out)
        with pytest.raises(ValueError, match=codec.name):
            codec.decode_add(damaged_payload, out)
        assert not out.any()
