"""Floats without a scale: bf16, fp16 and natural."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.kernels.floats import GROUP, KERNELS, LARGEST_FP16
from shardlab.codecs.kernels.random import random_bits
from tests.codecs.kernels.kernel_vectors import SPECIAL, any_bits, bits, from_bits, vectors

BF16, FP16, NATURAL = KERNELS["bf16"], KERNELS["fp16"], KERNELS["natural"]
KEY = (7, 11)


def test_bf16_rounds_to_nearest_even_and_keeps_nan():
    patterns = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFF800000]
    payload = BF16.encode(torch.tensor([from_bits(p) for p in patterns]), GROUP)
    words = payload.view(torch.int16).tolist()
    assert [w & 0xFFFF for w in words] == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80]


@pytest.mark.parametrize(("kernel", "kept_of_huge"), [(BF16, 3.0), (FP16, 3.4e38)])
def test_residual_stays_finite(kernel, kept_of_huge):
    kept = torch.tensor([1.0, 2.0, 3.0])
    kernel.encode_residual(torch.tensor([float("inf"), float("nan"), 3.4e38]), kept, kept, GROUP)
    assert kept.tolist() == torch.tensor([1.0, 2.0, kept_of_huge]).tolist()


def halves(x):
    return FP16.encode(x, GROUP).view(torch.float16)


@given(st.integers(0, 2**31))
def test_fp16_matches_torch_where_that_stays_finite(seed):
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


def test_every_float16_is_exact():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every.float()
    out = torch.zeros(len(x))
    FP16.decode_sum([FP16.encode(x, GROUP)], GROUP, out)
    assert bits(out) == bits(x)


def test_fp16_clamps_finite_values_and_keeps_the_rest():
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


def decoded(x, key=KEY):
    out = torch.zeros(len(x))
    NATURAL.decode_sum([NATURAL.encode(x, GROUP, key)], GROUP, out)
    return out


@given(vectors(specials=False))
def test_natural_decodes_to_an_adjacent_power_of_two(x):
    powers = decoded(x).double()
    smallest = torch.finfo(torch.float32).tiny
    normal = x.abs() >= smallest
    ratio = powers[normal] / x.double()[normal]
    assert bool(((ratio > 0.5) & (ratio <= 2)).all())
    assert set(torch.frexp(powers)[0].abs().tolist()) <= {0.0, 0.5}
    assert set(powers[~normal].abs().tolist()) <= {0.0, smallest}
    assert torch.equal(torch.signbit(powers), torch.signbit(x))


def test_natural_is_exact_for_powers_of_two_and_zeros():
    exponents = torch.arange(-126, 128)
    x = torch.cat([2.0**exponents, -(2.0**exponents), torch.tensor([0.0, -0.0])])
    assert bits(decoded(x)) == bits(x)


def z_of_mean(value, draws=1 << 20):
    x = torch.full((draws,), value)
    sent = decoded(x).double()
    below = 2.0 ** math.floor(math.log2(abs(value))) if abs(value) >= 2.0**-126 else 0.0
    above = below * 2 or 2.0**-126
    chance = (abs(x[0].double().item()) - below) / (above - below)
    deviation = math.sqrt(draws * chance * (1 - chance)) * (above - below)
    return (sent.sum().item() - draws * x[0].double().item()) / deviation


def test_natural_is_unbiased():
    values = [1.1, 1.5, 1.999, -3.3e-5, 1.3e38, -1.7e-38, 5e-39, -1e-40, 1e-3]
    assert max(abs(z_of_mean(value)) for value in values) < 4.5


def test_variance_of_natural_is_at_most_an_eighth_of_the_square():
    for value in (4 / 3, 1.1, 1.9):
        x = torch.full((1 << 18,), value)
        assert (decoded(x) - x).double().square().mean() <= value**2 / 8 * 1.01
    x = torch.full((1 << 18,), 4 / 3)
    assert (decoded(x) - x).double().square().mean() >= (4 / 3) ** 2 / 8 * 0.99


@given(st.integers(0, 2**31))
def test_natural_decodes_non_finite_and_huge_values_to_infinity(seed):
    x = torch.cat([any_bits(500, seed), torch.tensor(SPECIAL), torch.tensor([2.0**127, 1.8e38])])
    out = decoded(x)
    lost = ~(x.abs() <= 2.0**127)
    assert torch.equal(out.isinf(), lost)
    assert not out.isnan().any()
    kept = torch.full_like(x, 0.25)
    NATURAL.encode_residual(x, kept, kept, GROUP, KEY)
    assert kept.isfinite().all() and (kept[~(x + 0.25 <= 2.0**127)] == 0.25).all()


def test_payload_of_natural_has_the_documented_layout():
    n = GROUP + 17
    x = torch.ones(n)
    x[[3, 130, GROUP, GROUP + 3, GROUP + 16]] = torch.tensor([-2.0, -0.5, -0.0, -4.0, -torch.inf])
    exponents = [127] * n
    exponents[3], exponents[130], exponents[GROUP + 3] = 128, 126, 129
    exponents[GROUP], exponents[GROUP + 16] = 0, 255
    signs = [0] * 128
    signs[3] |= 1 << 0  # element 0 * 128 + 3
    signs[2] |= 1 << 1  # element 1 * 128 + 2
    # the last group has 17 elements, so 3 bytes of signs
    rest = [1 << 0, 1 << 5, 0]  # elements 0 and 5 * 3 + 1
    rest[0] |= 1 << 1  # element 1 * 3 + 0
    expected = [*exponents[:GROUP], *signs, *exponents[GROUP:], *rest]
    assert NATURAL.encode(x, GROUP, KEY).tolist() == expected
    assert NATURAL.payload_bytes(n, GROUP) == n + 128 + 3


def test_natural_draws_the_upper_bits_of_the_counter():
    x = torch.linspace(1, 1.999, 3000)
    chance = random_bits(3000, *KEY) >> 9
    up = (x.view(torch.int32) & 0x7FFFFF).long() + chance >= 1 << 23
    assert torch.equal(decoded(x) == 2, up)
