"""The compiled kernels compute the bits of the PyTorch reference, on any number of threads."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

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


@st.composite
def pairs(draw):
    """Draw a vector and a residual: numbers of one magnitude with special values, or any bits."""
    x = draw(st.one_of(vectors(), st.builds(any_bits, st.integers(1, 600), st.integers(0, 2**31))))
    residual = draw(vectors(n=len(x)))
    # the payload of a sum of two NaN depends on the order of operands
    residual[x.isnan() & residual.isnan()] = 0.0
    return x, residual


@every_codec
@given(pairs(), ALPHAS)
@example((any_bits(221, 61029), any_bits(221, 61030).nan_to_num()), 1 / 3)  # see square_root
@example((any_bits(8192, 1), any_bits(8192, 2).nan_to_num()), 1.0)  # whole groups alone
def test_kernels_compute_the_bits_of_the_reference(spec, pair, alpha):
    codec, (x, residual) = make_codec(spec), pair
    if len(x):
        check_as_reference(lambda: coded(codec, x, residual, alpha))


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
    assert torch.equal(codec.encode(x, KEY, message[1:]), codec.encode(x, KEY))


@pytest.mark.parametrize("spec", ["int8:group=8", "sign", "topk", "randomk"])
def test_unsuitable_tensors_are_refused(spec):
    codec, good = make_codec(spec), torch.zeros(16)
    for x in (good.double(), torch.zeros(32)[::2]):
        with pytest.raises(ValueError, match="must be a contiguous vector of 16"):
            codec.encode(x, KEY)
    with pytest.raises(ValueError, match="residual must be a contiguous vector of 16"):
        codec.encode_residual(good, torch.zeros(15), torch.zeros(16), KEY)


@pytest.mark.parametrize("spec", ["int8", "int4", "bf16", "natural", "fp8", "fp8:format=e5m2"])
@given(x=vectors(specials=False), seed=st.integers(0, 2**31))
def test_payload_and_residual_sum_to_the_input_exactly(spec, x, seed):
    residual = torch.randn(len(x), generator=torch.Generator().manual_seed(seed))
    corrected, sent, codec = x + residual, torch.zeros(len(x)), make_codec(spec)
    codec.decode_add(codec.encode_residual(x, residual, residual, KEY), sent)
    assert bits(sent + residual) == bits(corrected + 0.0)
