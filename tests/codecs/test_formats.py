"""Laws and known answers of single formats, beside the laws of every codec."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shardlab.codecs.floats import LEVELS
from shardlab.codecs.integers import NF4
from shardlab.codecs.randomk import random_positions
from shardlab.codecs.registry import make_codec
from shardlab.codecs.sketch import add_sketch, estimate
from tests.codecs.vectors import KEY, any_bits, bits, vectors

RANDOM = {
    "int8:rounding=stochastic": lambda x: x.abs().max() / 127,
    "int4:rounding=stochastic": lambda x: x.abs().max() / 7,
    "qsgd:levels=1": lambda x: x.norm(),
    "qsgd:levels=5": lambda x: x.norm() / 5,
    "qsgd:levels=7": lambda x: x.norm() / 7,
    "qsgd:levels=127": lambda x: x.norm() / 127,
}
"""Random codecs with the distance of two levels of a group x."""
ROUNDED_UP = 1 + 2.0**-7
"""Largest factor by which rounding to bfloat16 raises a scale."""
GROUPS = st.sampled_from([8, 128, 1000])


def sent(codec, x, key=KEY):
    codec = make_codec(codec) if isinstance(codec, str) else codec
    return codec.decode(codec.encode(x, key), x.numel(), key)


def heavy_tailed(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) ** 3 * 1e-3


@pytest.mark.parametrize(
    ("spec", "bits_per_element"),
    [
        *[("int8", 8.125), ("int4", 4.125), ("int4:levels=nf4,group=64", 4.25)],
        *[("qsgd:levels=1", 2.125), ("qsgd:levels=2", 4.125), ("qsgd:levels=7", 4.125)],
        *[("qsgd:levels=8", 8.125), ("qsgd:levels=127,group=512", 8.03125), ("natural", 9)],
        *[("sign", 1 + 32 / 4096), ("efsign", 1 + 16 / 512), ("onebit", 1 + 32 / 512)],
    ],
)
def test_bits_per_element_are_as_documented(spec, bits_per_element):
    assert make_codec(spec).payload_bytes(4096) * 8 / 4096 == bits_per_element


@pytest.mark.parametrize("spec", RANDOM)
def test_stochastic_codec_is_unbiased_at_the_largest_element_too(spec):
    codec, x, keys, groups = make_codec(spec), heavy_tailed(128, 1), 40, 100
    step, draws = RANDOM[spec](x) * ROUNDED_UP, keys * groups
    total = torch.zeros(128, dtype=torch.float64)
    for index in range(keys):
        decoded = sent(codec, x.repeat(groups), KEY._replace(step=index))
        error = (decoded.view(groups, 128) - x).abs()
        assert (error <= step * (1 + 1e-5)).all()  # the level below or above
        total += decoded.view(groups, 128).double().sum(0)
    share = (x.abs() / step) % 1
    deviation = step * (share * (1 - share)).sqrt() / draws**0.5
    error = (total / draws - x).abs()
    # the scale may be rounded up less, which changes the shares a little
    assert (error <= 5 * deviation + 0.5 * step / draws**0.5).all()
    assert error[x.abs().argmax()] <= 5 * step / 2 / draws**0.5
    # all errors together: their squares average to the variance, not more
    assert (error.square().mean() * draws) <= 1.5 * step.double() ** 2 / 4


@pytest.mark.parametrize("spec", [*RANDOM, "natural", "bf16:rounding=stochastic"])
def test_other_keys_draw_other_numbers_and_a_key_is_needed(spec):
    codec, x = make_codec(spec), heavy_tailed(4096, 3)
    keys = [KEY, KEY._replace(step=1), KEY._replace(rank=1), KEY._replace(unit="other")]
    payloads = [codec.encode(x, key) for key in keys]
    assert all(not torch.equal(payloads[0], other) for other in payloads[1:])
    with pytest.raises(ValueError, match="needs the key"):
        codec.encode(x)


@given(st.integers(0, 2**31), GROUPS, st.integers(-100, 100))
def test_int4_error_is_half_a_step_except_at_the_clipped_end(seed, group, power):
    x = heavy_tailed(300, seed) * 2.0**power
    error = (sent(f"int4:group={group}", x) - x).abs()
    for part, errors in zip(x.split(group), error.split(group), strict=True):
        largest = part[part.abs().argmax()]
        step = largest.abs() / 8 * ROUNDED_UP
        left_out = part * largest.sign() < -7.5 * largest.abs() / 8
        assert (errors <= step * torch.where(left_out, 1.0, 0.5) * (1 + 1e-5)).all()
    assert torch.equal(sent(f"int4:group={group}", -x), sent(f"int4:group={group}", x) * -1)


@given(st.integers(0, 2**31))
def test_nf4_rounds_to_the_nearest_level(seed):
    x = heavy_tailed(256, seed)
    error = (sent("int4:levels=nf4", x) - x).abs()
    for part, errors in zip(x.split(128), error.split(128), strict=True):
        scale = part.abs().max().to(torch.bfloat16).float()
        scale = scale if scale >= part.abs().max() else scale * ROUNDED_UP
        nearest = (part[:, None] - torch.tensor(NF4) * scale).abs().amin(1)
        assert (errors <= nearest + scale * 2.0**-7 + 1e-9).all()


def test_qsgd_variance_is_within_the_bound_of_the_paper():
    for levels, group in ((1, 128), (7, 128), (127, 512)):
        codec, x = make_codec(f"qsgd:levels={levels},group={group}"), heavy_tailed(group, 5)
        squares = [
            (sent(codec, x, KEY._replace(step=index)) - x).double().norm() ** 2
            for index in range(200)
        ]
        bound = min(group / levels**2, group**0.5 / levels) * x.double().norm() ** 2
        assert sum(squares) / 200 <= bound * ROUNDED_UP**2


def test_qsgd_rounds_to_a_neighbour_among_any_number_of_levels():
    x = heavy_tailed(512, 7)
    for levels in range(1, 128):
        step = torch.stack([part.norm() / levels * ROUNDED_UP for part in x.split(128)])
        error = (sent(f"qsgd:levels={levels}", x) - x).abs().view(4, 128)
        assert (error <= step[:, None] * (1 + 1e-5)).all(), levels


def test_qsgd_norm_neither_overflows_nor_underflows():
    for magnitude in (2.0**100, 1e-30, 2.0**-110):
        x = torch.full((128,), magnitude)
        assert sent("qsgd:levels=127", x).double().mean() == pytest.approx(magnitude, rel=0.05)


@given(st.integers(0, 2**31))
def test_halves_match_torch_also_where_they_overflow(seed):
    x = torch.cat([any_bits(500, seed), torch.tensor([65504.0, 65519.9, 65520, -65520, 3.4e38])])
    assert bits(sent("bf16", x)) == bits(x.bfloat16().float() + 0.0)
    assert bits(sent("fp16", x)) == bits(x.half().float() + 0.0)


@given(st.integers(0, 2**31))
@example(240813)  # a negative number that becomes zero, which has lost its sign in the sum
def test_stochastic_bf16_is_a_neighbour_and_keeps_what_bf16_holds(seed):
    x = any_bits(1000, seed)
    decoded, finite = sent("bf16:rounding=stochastic", x), x.isfinite()
    # cut to 16 bits: the neighbour towards zero; the other is a step of these bits away
    below = x.view(torch.int32) & -(1 << 16)
    steps = (decoded.abs().view(torch.int32) - (below & 0x7FFFFFFF))[finite] >> 16
    assert set(steps.tolist()) <= {0, 1} and bool(decoded[finite].isfinite().all())
    kept = finite & (decoded != 0)
    assert torch.equal(decoded[kept].sign(), x[kept].sign())
    assert torch.equal(decoded.isnan(), x.isnan())
    assert torch.equal(decoded[x.isinf()], x[x.isinf()])
    exact = below.view(torch.float32)
    assert bits(sent("bf16:rounding=stochastic", exact)) == bits(exact + 0.0)


def test_stochastic_bf16_keeps_the_largest_numbers_finite():
    largest = torch.finfo(torch.bfloat16).max
    x = torch.tensor([largest, 3.4e38, -3.4028234e38, math.inf, -math.inf]).repeat(100)
    found = sent("bf16:rounding=stochastic", x).view(100, 5)
    assert bool((found == torch.tensor([largest, largest, -largest, math.inf, -math.inf])).all())


@pytest.mark.parametrize("value", [1.001, -1.0039, 1.999, -3.3e-5, 3.3e38, -1.7e-38, -1e-40, 1e-45])
def test_stochastic_bf16_is_unbiased(value):
    x = torch.full((1 << 18,), value)
    decoded, exact = sent("bf16:rounding=stochastic", x).double(), x[0].double().item()
    deviation = decoded.std().item() / math.sqrt(len(x))
    assert deviation > 0 and abs(decoded.mean().item() - exact) < 4.5 * deviation


@given(vectors())
def test_natural_decodes_to_an_adjacent_power_of_two(x):
    powers = sent("natural", x).double()
    smallest, lost = torch.finfo(torch.float32).tiny, ~(x.abs() <= 2.0**127)
    assert torch.equal(powers.isinf(), lost)
    x, powers = x[~lost], powers[~lost]
    normal = x.abs() >= smallest
    ratio = powers[normal] / x.double()[normal]
    assert bool(((ratio > 0.5) & (ratio <= 2)).all())
    assert set(torch.frexp(powers)[0].abs().tolist()) <= {0.0, 0.5}
    assert set(powers[~normal].abs().tolist()) <= {0.0, smallest}


@pytest.mark.parametrize("value", [1.1, 4 / 3, 1.999, -3.3e-5, 1.3e38, -1.7e-38, -1e-40])
def test_natural_is_unbiased_with_the_variance_of_the_paper(value):
    x = torch.full((1 << 18,), value)
    decoded, exact = sent("natural", x).double(), x[0].double().item()
    deviation = decoded.std().item() / math.sqrt(len(x))
    assert abs(decoded.mean().item() - exact) < 4.5 * deviation
    if abs(value) >= 2.0**-126:
        assert (decoded - exact).square().mean() <= exact**2 / 8 * 1.01


@pytest.mark.parametrize(
    ("format", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_fp8_codes_match_torch(format, dtype):
    # all magnitudes between the codes and half-way between them, with a scale of one
    every = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    middles = (every[1:] + every[:-1]) / 2
    near = torch.nextafter(middles, torch.zeros(1)), torch.nextafter(middles, torch.tensor(1e9))
    x = torch.cat([every, middles, *near])
    x = torch.cat([every[-1:], x, -x])
    payload = make_codec(f"fp8:format={format},group=4096").encode(x)
    assert payload[:2].tolist() == [0x80, 0x3F]
    assert payload[2:].tolist() == x.to(dtype).view(torch.uint8).tolist()
    # smallest numbers decode to no subnormal float32
    for exponent in range(-149, -90):
        tiny = sent(f"fp8:format={format}", torch.linspace(-1, 1, 256) * 2.0**exponent).abs()
        assert bool(((tiny == 0) | (tiny >= torch.finfo(torch.float32).tiny)).all())


def test_dynamic8_levels_are_those_of_the_dynamic_tree():
    for code in range(256):
        tree = f"{code:08b}"
        zeros, indicator, fraction = tree[1:].partition("1")
        if not indicator:
            assert LEVELS[code] == (1.0 if tree[0] == "1" else 0.0)
            continue
        middle = Fraction(2 * int(fraction or "0", 2) + 1, 2 * 2 ** len(fraction))
        level = (Fraction(1, 10) + Fraction(9, 10) * middle) / 10 ** len(zeros)
        assert LEVELS[code] == float(-level if tree[0] == "1" else level)


def test_dynamic8_rounds_to_a_nearest_level_with_the_error_of_bitsandbytes():
    codec, table = make_codec("dynamic8"), torch.tensor(LEVELS)
    assert codec.encode(table).tolist() == [0x80, 0x3F, *range(256)]
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0)) * 1e-3
    payload = codec.encode(x)
    scales = payload[: 2 * len(x) // 256].view(torch.bfloat16).double().repeat_interleave(256)
    codes = payload[2 * len(x) // 256 :].long()
    ordered = table.double().sort().values
    exact = x.double() / scales
    at = torch.bucketize(exact, (ordered[1:] + ordered[:-1]) / 2)
    error = (table.double()[codes] - exact).abs()
    assert (error <= (ordered[at] - exact).abs() + exact.abs() * 2**-18).all()
    # bitsandbytes 0.50.2, blockwise at block 256, one scale in float32: 0.0108
    assert 0.0105 < ((sent(codec, x) - x).norm() / x.norm()).item() < 0.0111


@given(vectors(specials=False), GROUPS)
def test_one_bit_codecs_contract_as_documented(x, group):
    assume(x.numel() and 2.0**-60 < x.abs().max() < 2.0**60)
    for part in x.split(group):
        exact = part.double()
        efsign, onebit = (
            (sent(f"{name}:group={group}", part) - exact).square().sum()
            for name in ("efsign", "onebit")
        )
        square, density = exact.square().sum(), exact.abs().sum() ** 2 / len(part)
        # |x|^2 - density, up to the rounding of the mean
        assert efsign <= square - density * (1 - 2.0**-16)
        assert onebit <= efsign + square * 2.0**-16


def test_onebit_decodes_to_the_means_of_both_signs():
    x = torch.tensor([1.0, -0.5, 3.0, 0.0, -1.5, 0.0, -1.0, 4.0, -3.0, -1.0])
    negative, positive = -1.0, 1.6015625  # 8 / 5 in bfloat16
    first = [positive, negative, positive, positive, negative, positive, negative, positive]
    assert sent("onebit:group=8", x).tolist() == [*first, -2.0, -2.0]


@given(
    st.one_of(st.integers(1, 40), st.integers(250, 260)),
    st.integers(0, 2**31),
    st.one_of(st.integers(1, 30), st.integers(500, 1100)),
)
def test_majority_wins_and_ties_are_zero(count, seed, n):
    """Vote on signs of magnitude 1, so that the result is the sign of their sum."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (count, n), generator=generator) * 2.0 - 1.0
    codec, out = make_codec("sign"), torch.empty(n)
    codec.decode_sum([codec.encode(x) for x in signs], out, 1 / 4)
    assert torch.equal(out, signs.sum(0).sign() * (count / 4))


def test_vote_has_the_sum_of_the_means_and_zeros_have_no_vote():
    codec, out = make_codec("sign"), torch.empty(4)
    messages = [[2.0, -2.0, 2.0, 2.0], [-1.0, -1.0, 1.0, 0.0], [-3.0, 3.0, 3.0, -3.0], [0.0] * 4]
    payloads = [codec.encode(torch.tensor(x)) for x in messages]
    codec.decode_sum(payloads, out, 1 / 3)
    mean = (2 + 0.75 + 3) / 3
    torch.testing.assert_close(out, torch.tensor([-mean, -mean, mean, mean]))
    # a message that is not finite makes ties NaN, too
    codec.decode_sum([codec.encode(torch.full((4,), torch.inf)), payloads[0]], out)
    assert out.isnan().all()


@given(st.integers(1, 2**31 - 1), st.data(), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_random_positions_are_ascending_different_and_in_range(n, data, k0, k1):
    k = data.draw(st.integers(1, min(n, 300)))
    positions = random_positions(n, k, (k0, k1), torch.device("cpu")).long()
    assert len(positions) == k and int(positions[0]) >= 0 and int(positions[-1]) < n
    assert bool((positions.diff() > 0).all())


def test_every_element_is_drawn_equally_often_and_a_key_fixes_the_positions():
    cpu, n, k, draws = torch.device("cpu"), 23, 7, 3000  # parts of three and of four elements
    assert random_positions(1000, 5, (1, 2), cpu).tolist() == [208, 333, 541, 684, 992]
    counts = torch.zeros(n)
    for seed in range(draws):
        counts[random_positions(n, k, (seed, 12345), cpu).long()] += 1
    expected = draws * k / n
    assert ((counts - expected).abs() < 4.5 * (expected * (1 - k / n)) ** 0.5).all()


def test_sketches_are_linear_and_estimate_a_dominant_element():
    keys = [(0x9E3779B9 * row & 0xFFFFFFFF, 7 * row + 1) for row in range(5)]
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(-9, 9, (2000,), generator=generator).float() for _ in range(2))
    x[77] = 1e6
    tables = torch.zeros(3, 5, 50)
    for vector, table in zip((x, y, x + y), tables, strict=True):
        add_sketch(vector, keys, table)
    assert torch.equal(tables[0] + tables[1], tables[2])
    estimates = estimate(tables[2], keys, 2000)
    assert int(estimates.argmax()) == 77 and float(estimates[77]) == pytest.approx(1e6, rel=1e-3)
