"""The compiled kernels compute the bits of the PyTorch reference, on any number of threads."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardlab.codecs.native import compiled
from shardlab.codecs.registry import make_codec
from tests.codecs.codec_examples import SPECS
from tests.codecs.vectors import (
    ALPHAS,
    KEY,
    any_bits,
    bits,
    check_as_reference,
    check_thread_counts,
    coded,
    needs_compiled,
    vectors,
)

pytestmark = needs_compiled
every_codec = pytest.mark.parametrize("spec", SPECS)


@every_codec
@given(st.data(), ALPHAS)
def test_kernels_compute_the_bits_of_the_reference(spec, data, alpha):
    codec, x = make_codec(spec), data.draw(vectors())
    residual = data.draw(vectors(n=len(x)))
    # the payload of a sum of two NaN depends on the order of operands
    residual[x.isnan() & residual.isnan()] = 0.0
    if len(x):
        check_as_reference(lambda: coded(codec, x, residual, alpha))


@every_codec
@given(st.integers(0, 2**31), st.integers(1, 600))
@example(seed=61029, n=221)  # a square root that torch rounds incorrectly
def test_kernels_compute_the_bits_of_the_reference_for_any_bits(spec, seed, n):
    codec, x, residual = make_codec(spec), any_bits(n, seed), any_bits(n, seed + 1)
    residual[x.isnan() & residual.isnan()] = 0.0
    check_as_reference(lambda: coded(codec, x, residual))


@pytest.mark.parametrize("group", [8, 1000, 4096])
@pytest.mark.parametrize("spec", ["int8", "int4", "fp8", "int4:levels=nf4"])
def test_groups_of_any_size_have_the_bits_of_the_reference(spec, group):
    x, residual = torch.randn(2, 9001, generator=torch.Generator().manual_seed(group))
    separator = "," if ":" in spec else ":"
    codec = make_codec(f"{spec}{separator}group={group}")
    check_as_reference(lambda: coded(codec, x, residual))


@pytest.mark.parametrize("count", [1, 3, 20, 300])
def test_votes_of_many_ranks_have_the_bits_of_the_reference(count):
    codec, generator = make_codec("sign"), torch.Generator().manual_seed(count)
    payloads = [codec.encode(torch.randn(1300, generator=generator)) for _ in range(count)]

    def compute():
        out = torch.empty(1300)
        codec.decode_sum(payloads, out, 1 / count)
        return [out]

    check_as_reference(compute)


@every_codec
def test_results_do_not_depend_on_the_number_of_threads(spec):
    x, residual = torch.randn(2, 300_001, generator=torch.Generator().manual_seed(1))
    check_thread_counts(lambda: coded(make_codec(spec), x, residual))


@every_codec
def test_payloads_may_start_at_odd_addresses(spec):
    codec, x = make_codec(spec), torch.randn(77)
    message = torch.zeros(1 + codec.payload_bytes(77), dtype=torch.uint8)
    payload = codec.encode(x, KEY).clone()
    if "fp32" in str(getattr(codec, "values", "fp32")) and codec.name in ("none", "randomk"):
        pytest.skip("a view of float32")
    part = codec.encode(x, KEY, message[1:])
    assert torch.equal(part, payload)


@pytest.mark.parametrize("spec", ["int8:group=8", "sign", "topk", "natural"])
def test_unsuitable_tensors_are_refused(spec):
    codec, good = make_codec(spec), torch.zeros(16)
    for x in (good.double(), torch.zeros(32)[::2]):
        with pytest.raises(ValueError, match="must be a contiguous float32 vector"):
            codec.encode(x, KEY)
    with pytest.raises(ValueError, match="must have the length"):
        codec.encode_residual(good, torch.zeros(15), torch.zeros(16), KEY)
    assert compiled(good)


def test_kernels_appear_in_profiles_by_name():
    x = torch.randn(64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for spec in ("int8", "topk"):
            make_codec(spec).decode_add(make_codec(spec).encode(x), x)
    names = {event.key for event in profile.key_averages()}
    assert {"shardlab::int8_encode", "shardlab::int8_decode", "shardlab::select_largest"} <= names


def test_codecs_trace_without_data():
    with torch._subclasses.FakeTensorMode():
        x, codec = torch.empty(100), make_codec("int8:group=8")
        payload = codec.encode_residual(x, torch.empty(100), torch.empty(100))
        codec.decode_add(payload, x, 0.5)
        assert payload.shape == (2 * 13 + 100,)


@pytest.mark.parametrize("spec", ["int8", "int4", "bf16", "natural", "fp8", "fp8:format=e5m2"])
@given(x=vectors(specials=False), seed=st.integers(0, 2**31))
def test_payload_and_residual_sum_to_the_input_exactly(spec, x, seed):
    kept = torch.randn(len(x), generator=torch.Generator().manual_seed(seed))
    wanted, sent, codec = x + kept, torch.zeros(len(x)), make_codec(spec)
    codec.decode_add(codec.encode_residual(x, kept, kept, KEY), sent)
    assert bits(sent + kept) == bits(wanted + 0.0)
