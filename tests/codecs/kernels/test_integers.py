"""Integers with a scale: bounds, and payloads byte for byte as documented."""

import torch
from hypothesis import given

from shardlab.codecs.kernels.integers import KERNELS, NF4
from shardlab.codecs.kernels.random import random_bits
from tests.codecs.kernels.kernel_vectors import GROUPS, vectors

KEY = (7, 11)


def decoded(payload, n, group):
    out = torch.zeros(n)
    KERNELS["int8"].decode_add(payload, group, out)
    return out


@given(vectors(specials=False), GROUPS)
def test_int8_error_is_at_most_half_a_step(x, group):
    for start in range(0, len(x), group):
        part = x[start : start + group]
        step = max(part.abs().max().item() / 127, 2.0**-126) * (1 + 2**-7)
        error = (decoded(KERNELS["int8"].encode(part, group), len(part), group) - part).abs().max()
        assert error.item() <= step / 2 * (1 + 2**-20)


def test_payload_of_int8_has_the_documented_layout():
    x = torch.tensor([127.0, -63.5, 0.5, 1.5, 0, 0, 0, 0] + [0.0] * 8 + [254.0])
    assert KERNELS["int8"].encode(x, 8).tolist() == [
        *(0x80, 0x3F, 0x00, 0x00, 0x00, 0x40),  # bfloat16 1, 0 and 2
        *(127, 256 - 64, 0, 2, 0, 0, 0, 0),  # ties to even
        *([0] * 8),
        127,
    ]


def encoded(kernel, values, group=8, key=KEY):
    return kernel.encode(torch.tensor(values), group, key).tolist()


def planes(codes):
    """Pack a group of four-bit codes: the first half in the lower, the other in the upper bits."""
    half = (len(codes) + 1) // 2
    codes = [*codes, *[0] * (2 * half - len(codes))]
    return [low | high << 4 for low, high in zip(codes[:half], codes[half:], strict=True)]


def test_int4_codes_the_largest_element_as_minus_eight():
    assert encoded(KERNELS["int4"], [8.0, -8.0, 0.5, 1.5, 2.5, -1.0, 0.0, 7.0]) == [
        *(0x80, 0xBF),  # bfloat16 -1
        # -x to the nearest, ties to even, clipped at 7; all plus 8
        *planes([0, 15, 8, 6, 6, 9, 8, 1]),
    ]
    assert encoded(KERNELS["int4"], [-8.0, 7.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])[:3] == [
        0x80,
        0x3F,
        128,
    ]


def test_short_last_group_is_packed_separately():
    payload = encoded(KERNELS["int4"], [0.0] * 8 + [-8.0, 1.0, 2.0])
    assert payload == [0, 0, 0x80, 0x3F, *planes([8] * 8), *planes([0, 9, 10])]


def test_nf4_codes_are_levels_of_the_largest_magnitude():
    values = [level * 4 for level in NF4]
    payload = encoded(KERNELS["nf4"], values, 16)
    assert payload == [0x80, 0x40, *planes(range(16))]
    out = torch.zeros(16)
    KERNELS["nf4"].decode_add(torch.tensor(payload, dtype=torch.uint8), 16, out)
    assert out.tolist() == values
    assert encoded(KERNELS["nf4"], [0.0] * 8) == [0, 0, *planes([7] * 8)]


def test_stochastic_codes_are_the_floor_of_steps_plus_24_random_bits():
    x = torch.tensor([127.0, -127.0, 0.25, -0.25, 3.0, 0.75, -64.5, 0.0] * 4)
    payload = KERNELS["int8_stochastic"].encode(x, 32, KEY)
    assert payload[:2].tolist() == [0x80, 0x3F]
    draws = (random_bits(32, *KEY) >> 8).double() * 2.0**-24
    assert payload[2:].view(torch.int8).tolist() == (x.double() + draws).floor().int().tolist()


def test_qsgd_scale_is_the_euclidean_norm():
    for levels in (1, 7, 127):
        x = torch.zeros(16)
        x[3], x[12] = 3.0 * levels, 4.0 * levels
        payload = KERNELS[f"qsgd{levels}"].encode(x, 16, KEY)
        assert payload[:2].tolist() == [0xA0, 0x40]  # bfloat16 5


def test_qsgd_codes_of_two_bits():
    # a single nonzero element equals the norm, so its code is certain: 1 + 2, in plane 1 of byte 1
    payload = encoded(KERNELS["qsgd1"], [0, 0, 0, 2.0, 0, 0, 0, 0])
    assert payload == [0x00, 0x40, 0b10101010, 0b10101110]


def test_qsgd_norm_neither_overflows_nor_underflows():
    for power in (-140, -126, -70, -29, 0, 49, 51, 119):
        x = torch.zeros(24)
        x[0], x[9] = 3 * 2.0 ** (power - 2), 4 * 2.0 ** (power - 2)
        scale = KERNELS["qsgd1"].encode(x, 24, KEY)[:2].view(torch.bfloat16).item()
        assert scale == max(5 * 2.0 ** (power - 2), 2.0**-126)
