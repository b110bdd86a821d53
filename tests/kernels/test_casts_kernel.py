import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardlab.kernels.casts import BF16, FP16, GROUP, LARGEST_FP16
from tests.kernels.kernel_vectors import any_bits, bits, from_bits, vectors


@given(st.data())
def test_sent_and_kept_add_up_to_what_was_given_exactly(data):
    x = data.draw(vectors(specials=False))
    kept = data.draw(vectors(n=len(x), specials=False))
    wanted = x + kept
    assume(bool((wanted.abs() < 2.0**127).all()))
    sent = torch.zeros(len(x))
    BF16.decode_add(BF16.encode_residual(x, kept, kept, GROUP), GROUP, sent)
    assert bits(sent + kept) == bits(wanted + 0.0)


def test_rounds_to_nearest_with_ties_to_even_and_keeps_nan():
    patterns = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFF800000]
    payload = BF16.encode(torch.tensor([from_bits(p) for p in patterns]), GROUP)
    words = payload.view(torch.int16).tolist()
    assert [w & 0xFFFF for w in words] == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80]


@pytest.mark.parametrize(("kernel", "kept_of_huge"), [(BF16, 3.0), (FP16, 3.4e38)])
def test_a_residual_never_becomes_infinite(kernel, kept_of_huge):
    kept = torch.tensor([1.0, 2.0, 3.0])
    kernel.encode_residual(torch.tensor([float("inf"), float("nan"), 3.4e38]), kept, kept, GROUP)
    assert kept.tolist() == torch.tensor([1.0, 2.0, kept_of_huge]).tolist()


def halves(x):
    return FP16.encode(x, GROUP).view(torch.float16)


@given(st.integers(0, 2**31))
def test_fp16_is_torchs_own_rounding_where_that_stays_finite(seed):
    x = any_bits(3000, seed)
    # exponents around those of float16, so that most examples are in its range
    x = torch.cat([x, (x.view(torch.int32) & ~(0x70 << 23) | (0x38 << 23)).view(torch.float32)])
    expected = x.to(torch.float16)
    expected[expected.isinf() & x.isfinite()] = LARGEST_FP16
    expected.copysign_(x)
    got = halves(x)
    assert torch.equal(got.isnan(), x.isnan())
    number = ~x.isnan()
    assert torch.equal(got[number].view(torch.int16), expected[number].view(torch.int16))


def test_every_float16_survives_the_way_there_and_back():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every.float()
    out = torch.zeros(len(x))
    FP16.decode_sum([FP16.encode(x, GROUP)], GROUP, out)
    assert bits(out) == bits(x)


def test_a_finite_number_never_becomes_infinite_in_fp16_and_the_rest_is_kept():
    x = torch.tensor([65504.0, 65519.0, 65520.0, 1e6, -3e38, float("inf"), -float("inf")])
    kept = torch.zeros(len(x))
    payload = FP16.encode_residual(x, kept, kept, GROUP)
    infinite = float("inf")
    assert payload.view(torch.float16).tolist() == (
        [65504.0, 65504.0, 65504.0, 65504.0, -65504.0, infinite, -infinite]
    )
    assert kept.tolist() == [0.0, 15.0, 16.0, 934496.0, (x[4] + 65504.0).item(), 0.0, 0.0]


def test_fp16_rounds_subnormal_numbers_and_ties_to_even():
    unit = 2.0**-24
    x = torch.tensor([0.5, 0.5000001, 1.5, 2.5, -2.5, 1023.5, 1e-20, -0.0]) * unit
    words = FP16.encode(torch.cat([x, torch.tensor([1 + 2**-11, 1 + 3 * 2**-11])]), GROUP)
    assert [w & 0xFFFF for w in words.view(torch.int16).tolist()] == [
        *(0, 1, 2, 2, 0x8002, 0x400, 0, 0x8000),
        *(0x3C00, 0x3C02),
    ]


def test_fp16_keeps_sign_and_upper_bits_of_nan():
    patterns = [0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF802000, 0x7FC04000]
    words = FP16.encode(torch.tensor([from_bits(p) for p in patterns]), GROUP).view(torch.int16)
    assert [w & 0xFFFF for w in words.tolist()] == [0x7E00, 0xFFFF, 0x7E00, 0xFE01, 0x7E02]
