"""Payloads of the integer kernels, byte for byte as documented."""

import torch

from shardlab.kernels import int4, int8, qsgd
from shardlab.kernels.random import random_bits

KEY = (7, 11)


def encoded(kernel, values, group=8, key=KEY):
    return kernel.encode(torch.tensor(values), group, key).tolist()


def planes(codes):
    """One group of four-bit codes: the first half in the lower, the other in the upper bits."""
    half = (len(codes) + 1) // 2
    codes = [*codes, *[0] * (2 * half - len(codes))]
    return [low | high << 4 for low, high in zip(codes[:half], codes[half:], strict=True)]


def test_int4_gives_the_largest_element_the_code_of_minus_eight():
    assert encoded(int4.NEAREST, [8.0, -8.0, 0.5, 1.5, 2.5, -1.0, 0.0, 7.0]) == [
        *(0x80, 0xBF),  # bfloat16 -1
        # -x to the nearest, ties to even, clipped at 7; all plus 8
        *planes([0, 15, 8, 6, 6, 9, 8, 1]),
    ]
    assert encoded(int4.NEAREST, [-8.0, 7.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])[:3] == [0x80, 0x3F, 128]


def test_a_short_last_group_has_planes_of_its_own():
    payload = encoded(int4.NEAREST, [0.0] * 8 + [-8.0, 1.0, 2.0])
    assert payload == [0, 0, 0x80, 0x3F, *planes([8] * 8), *planes([0, 9, 10])]


def test_nf4_holds_the_levels_times_the_largest_magnitude():
    values = [level * 4 for level in int4.NF4]
    payload = encoded(int4.NORMAL_FLOAT, values, 16)
    assert payload == [0x80, 0x40, *planes(range(16))]
    out = torch.zeros(16)
    int4.NORMAL_FLOAT.decode_add(torch.tensor(payload, dtype=torch.uint8), 16, out)
    assert out.tolist() == values
    assert encoded(int4.NORMAL_FLOAT, [0.0] * 8) == [0, 0, *planes([7] * 8)]


def test_random_codes_are_the_floor_of_steps_and_24_random_bits():
    x = torch.tensor([127.0, -127.0, 0.25, -0.25, 3.0, 0.75, -64.5, 0.0] * 4)
    payload = int8.STOCHASTIC.encode(x, 32, KEY)
    assert payload[:2].tolist() == [0x80, 0x3F]
    draws = (random_bits(32, *KEY) >> 8).double() * 2.0**-24
    assert payload[2:].view(torch.int8).tolist() == (x.double() + draws).floor().int().tolist()


def test_qsgd_measures_by_the_norm():
    for levels, kernel in qsgd.KERNELS.items():
        x = torch.zeros(16)
        x[3], x[12] = 3.0 * levels, 4.0 * levels
        payload = kernel.encode(x, 16, KEY)
        assert payload[:2].tolist() == [0xA0, 0x40]  # bfloat16 5


def test_qsgd_codes_of_two_bits():
    # a lone element has the norm, so its code is certain: 1 + 2, in plane 1 of byte 1
    payload = encoded(qsgd.KERNELS[1], [0, 0, 0, 2.0, 0, 0, 0, 0])
    assert payload == [0x00, 0x40, 0b10101010, 0b10101110]


def test_norms_of_any_magnitude_neither_overflow_nor_vanish():
    for power in (-140, -126, -70, -29, 0, 49, 51, 119):
        x = torch.zeros(24)
        x[0], x[9] = 3 * 2.0 ** (power - 2), 4 * 2.0 ** (power - 2)
        scale = qsgd.KERNELS[1].encode(x, 24, KEY)[:2].view(torch.bfloat16).item()
        assert scale == max(5 * 2.0 ** (power - 2), 2.0**-126)
