import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.kernels.natural import GROUP, KERNEL
from shardlab.kernels.random import random_bits
from tests.kernels.kernel_vectors import SPECIAL, any_bits, bits, vectors

KEY = (7, 11)


def decoded(x, key=KEY):
    out = torch.zeros(len(x))
    KERNEL.decode_sum([KERNEL.encode(x, GROUP, key)], GROUP, out)
    return out


@given(vectors(specials=False))
def test_every_element_becomes_a_power_of_two_on_either_side(x):
    powers = decoded(x).double()
    smallest = torch.finfo(torch.float32).tiny
    normal = x.abs() >= smallest
    ratio = powers[normal] / x.double()[normal]
    assert bool(((ratio > 0.5) & (ratio <= 2)).all())
    assert set(torch.frexp(powers)[0].abs().tolist()) <= {0.0, 0.5}
    assert set(powers[~normal].abs().tolist()) <= {0.0, smallest}
    assert torch.equal(torch.signbit(powers), torch.signbit(x))


def test_powers_of_two_and_zeros_are_exact():
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


def test_the_mean_is_what_was_given():
    values = [1.1, 1.5, 1.999, -3.3e-5, 1.3e38, -1.7e-38, 5e-39, -1e-40, 1e-3]
    assert max(abs(z_of_mean(value)) for value in values) < 4.5


def test_the_variance_is_at_most_an_eighth_of_the_square():
    for value in (4 / 3, 1.1, 1.9):
        x = torch.full((1 << 18,), value)
        assert (decoded(x) - x).double().square().mean() <= value**2 / 8 * 1.01
    x = torch.full((1 << 18,), 4 / 3)
    assert (decoded(x) - x).double().square().mean() >= (4 / 3) ** 2 / 8 * 0.99


@given(st.integers(0, 2**31))
def test_all_that_is_not_finite_or_has_no_power_above_becomes_infinite(seed):
    x = torch.cat([any_bits(500, seed), torch.tensor(SPECIAL), torch.tensor([2.0**127, 1.8e38])])
    out = decoded(x)
    lost = ~(x.abs() <= 2.0**127)
    assert torch.equal(out.isinf(), lost)
    assert not out.isnan().any()
    kept = torch.full_like(x, 0.25)
    KERNEL.encode_residual(x, kept, kept, GROUP, KEY)
    assert kept.isfinite().all() and (kept[~(x + 0.25 <= 2.0**127)] == 0.25).all()


def test_sent_and_kept_add_up_to_what_was_given_exactly():
    x = any_bits(100_000, 3)
    x = x[x.abs() < 2.0**126]
    for given_residual in (torch.zeros_like(x), x.flip(0)):
        kept, wanted = given_residual.clone(), x + given_residual
        out = torch.zeros(len(x))
        payload = KERNEL.encode_residual(x, kept, kept, GROUP, KEY)
        KERNEL.decode_add(payload, GROUP, out)
        assert bits(out + kept) == bits(wanted + 0.0)


def test_the_payload_is_laid_out_as_documented():
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
    assert KERNEL.encode(x, GROUP, KEY).tolist() == expected
    assert KERNEL.payload_bytes(n, GROUP) == n + 128 + 3


def test_the_random_numbers_are_the_upper_bits_of_the_elements_counter():
    x = torch.linspace(1, 1.999, 3000)
    chance = random_bits(3000, *KEY) >> 9
    up = (x.view(torch.int32) & 0x7FFFFF).long() + chance >= 1 << 23
    assert torch.equal(decoded(x) == 2, up)
