"""Integers with a scale per group: bias, error bounds, zeros, sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.base import MessageKey
from shardlab.codecs.integers import NF4
from shardlab.codecs.registry import make_codec

RANDOM = {
    "int8:rounding=stochastic": lambda x: x.abs().max() / 127,
    "int4:rounding=stochastic": lambda x: x.abs().max() / 7,
    "qsgd:levels=1": lambda x: x.norm(),
    "qsgd:levels=7": lambda x: x.norm() / 7,
    "qsgd:levels=127": lambda x: x.norm() / 127,
}
"""with the distance of two levels in a group"""
KEY = MessageKey(0, 0, "unit", 0)
ROUNDED_UP = 1 + 2.0**-7
"""how much larger a scale may be in bfloat16"""


def sent(codec, x, key=KEY):
    return codec.decode(codec.encode(x, key), x.numel(), key)


def heavy_tailed(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) ** 3 * 1e-3


@pytest.mark.parametrize("spec", RANDOM)
def test_stochastic_codec_is_unbiased_at_the_largest_element_too(spec):
    codec, x, keys, groups = make_codec(spec), heavy_tailed(128, 1), 40, 100
    step, draws = RANDOM[spec](x) * ROUNDED_UP, keys * groups
    total = torch.zeros(128, dtype=torch.float64)
    for index in range(keys):
        found = sent(codec, x.repeat(groups), KEY._replace(step=index))
        total += found.view(groups, 128).double().sum(0)
    share = (x.abs() / step) % 1
    deviation = step * (share * (1 - share)).sqrt() / draws**0.5
    error = (total / draws - x).abs()
    # the scale may be rounded up less, which changes the shares a little
    assert (error <= 5 * deviation + 0.5 * step / draws**0.5).all()
    assert error[x.abs().argmax()] <= 5 * step / 2 / draws**0.5
    # all errors together: their squares average to the variance, not more
    assert (error.square().mean() * draws) <= 1.5 * step.double() ** 2 / 4


@pytest.mark.parametrize("spec", RANDOM)
def test_stochastic_code_is_adjacent_to_the_element(spec):
    codec, x = make_codec(spec), heavy_tailed(128, 2)
    for index in range(20):
        error = (sent(codec, x, KEY._replace(step=index)) - x).abs()
        assert (error <= RANDOM[spec](x) * ROUNDED_UP * (1 + 1e-5)).all()


@pytest.mark.parametrize("spec", RANDOM)
def test_other_keys_draw_other_numbers(spec):
    codec, x = make_codec(spec), heavy_tailed(4096, 3)
    keys = [KEY, KEY._replace(step=1), KEY._replace(rank=1), KEY._replace(unit="other")]
    payloads = [codec.encode(x, key) for key in keys]
    assert torch.equal(payloads[0], codec.encode(x, KEY))
    assert all(not torch.equal(payloads[0], other) for other in payloads[1:])


@pytest.mark.parametrize("spec", RANDOM)
def test_stochastic_codec_needs_a_key(spec):
    with pytest.raises(ValueError, match="needs the key"):
        make_codec(spec).encode(torch.ones(8))


@given(st.integers(0, 2**31), st.sampled_from([8, 128, 1000]), st.integers(-100, 100))
def test_int4_error_is_half_a_step_except_at_the_clipped_end(seed, group, power):
    x = heavy_tailed(300, seed) * 2.0**power
    error = (sent(make_codec(f"int4:group={group}"), x) - x).abs()
    for part, errors in zip(x.split(group), error.split(group), strict=True):
        largest = part[part.abs().argmax()]
        step = largest.abs() / 8 * ROUNDED_UP
        left_out = part * largest.sign() < -7.5 * largest.abs() / 8
        assert (errors <= step * torch.where(left_out, 1.0, 0.5) * (1 + 1e-5)).all()


@given(st.integers(0, 2**31))
def test_int4_is_odd(seed):
    x, codec = heavy_tailed(300, seed), make_codec("int4")
    assert torch.equal(sent(codec, -x), -sent(codec, x))


@given(st.integers(0, 2**31))
def test_nf4_rounds_to_the_nearest_level(seed):
    x = heavy_tailed(256, seed)
    error = (sent(make_codec("int4:levels=nf4"), x) - x).abs()
    for part, errors in zip(x.split(128), error.split(128), strict=True):
        scale = part.abs().max().to(torch.bfloat16).float()
        scale = scale if scale >= part.abs().max() else scale * (1 + 2.0**-7)
        nearest = (part[:, None] - torch.tensor(NF4) * scale).abs().amin(1)
        assert (errors <= nearest + scale * 2.0**-7 + 1e-9).all()
        assert (errors <= 0.152 * scale * (1 + 1e-5)).all()


def test_qsgd_variance_is_within_the_bound_of_the_paper():
    for levels, group in ((1, 128), (7, 128), (127, 512)):
        codec, x = make_codec(f"qsgd:levels={levels},group={group}"), heavy_tailed(group, 5)
        squares = [
            (sent(codec, x, KEY._replace(step=index)) - x).double().norm() ** 2
            for index in range(200)
        ]
        bound = min(group / levels**2, group**0.5 / levels) * x.double().norm() ** 2
        assert sum(squares) / 200 <= bound * ROUNDED_UP**2


def test_bits_per_element():
    for spec, bits in (
        ("int8", 8.125),
        ("int4", 4.125),
        ("int4:levels=nf4,group=64", 4.25),
        ("qsgd:levels=1", 2.125),
        ("qsgd:levels=7", 4.125),
        ("qsgd:levels=127,group=512", 8.03125),
    ):
        assert make_codec(spec).payload_bytes(4096) * 8 / 4096 == bits
