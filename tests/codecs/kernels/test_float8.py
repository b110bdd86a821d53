"""Eight-bit floats with a scale: e4m3, e5m2 and dynamic8."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given

from shardlab.codecs.kernels.float8 import KERNELS, LEVELS
from tests.codecs.kernels.kernel_vectors import GROUPS, bits, vectors

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# largest number, smallest scale, half a unit in the last place, half the smallest number
LIMITS = {"e4m3": (448, 2.0**-116, 2**-4, 2**-10), "e5m2": (57344, 2.0**-109, 2**-3, 2**-17)}
each_format = pytest.mark.parametrize("format", DTYPES)
DYNAMIC8 = KERNELS["dynamic8"]
TABLE = torch.tensor(LEVELS).double()


def decoded(kernel, payload, n, group):
    out = torch.zeros(n)
    kernel.decode_sum([payload], group, out)
    return out


@each_format
def test_fp8_codes_match_torch(format):
    # all magnitudes between the codes and half-way between them, with a scale of one
    kernel, dtype = KERNELS[format], DTYPES[format]
    every = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    middles = (every[1:] + every[:-1]) / 2
    beside = torch.nextafter(middles, torch.zeros(1)), torch.nextafter(middles, torch.tensor(1e9))
    x = torch.cat([every, middles, *beside])
    x = torch.cat([every[-1:], x, -x])
    payload = kernel.encode(x, 4096)
    assert payload[:2].tolist() == [0x80, 0x3F]
    assert payload[2:].tolist() == x.to(dtype).view(torch.uint8).tolist()
    assert bits(decoded(kernel, payload, len(x), 4096)) == bits(x.to(dtype).float())


@each_format
@given(x=vectors(specials=False), group=GROUPS)
def test_fp8_error_is_at_most_half_a_unit_in_the_last_place(format, x, group):
    kernel, (largest, smallest, relative, absolute) = KERNELS[format], LIMITS[format]
    for start in range(0, len(x), group):
        part = x[start : start + group].double()
        scale = max(part.abs().max().item() / largest, smallest) * (1 + 2**-7)
        sent = decoded(kernel, kernel.encode(part.float(), group), len(part), group)
        bound = torch.maximum(part.abs() * relative, torch.tensor(absolute * scale))
        assert bool(((sent.double() - part).abs() <= bound * (1 + 2**-20)).all())


@each_format
def test_fp8_decodes_to_no_subnormal_value(format):
    kernel, smallest = KERNELS[format], torch.finfo(torch.float32).tiny
    for exponent in range(-149, -90):
        x = torch.linspace(-1, 1, 256) * 2.0**exponent
        sent = decoded(kernel, kernel.encode(x, 256), 256, 256)
        assert bool(((sent == 0) | (sent.abs() >= smallest)).all())


def test_payloads_of_fp8_have_the_documented_layout():
    x = torch.tensor([448.0, -1.0, 2**-6, 2**-9, 17.0, 19.0, -0.0, 0.0] + [0.0] * 8 + [-896.0])
    assert KERNELS["e4m3"].encode(x, 8).tolist() == [
        *(0x80, 0x3F, 0x00, 0x00, 0x00, 0x40),  # bfloat16 1, 0 and 2
        *(0x7E, 0xB8, 0x08, 0x01, 0x58, 0x5A, 0x80, 0x00),  # ties to even
        *([0] * 8),
        0xFE,
    ]
    x = torch.tensor([57344.0, -1.0, 2**-14, 2**-16, 4.5, 5.5, -0.0, 0.0])
    assert KERNELS["e5m2"].encode(x, 8).tolist() == [
        *(0x80, 0x3F),
        *(0x7B, 0xBC, 0x04, 0x01, 0x44, 0x46, 0x80, 0x00),
    ]


def test_dynamic8_levels_are_those_of_the_dynamic_tree():
    for code in range(256):
        tree = f"{code:08b}"
        zeros, indicator, fraction = tree[1:].partition("1")
        if not indicator:
            assert LEVELS[code] == (1.0 if tree[0] == "1" else 0.0)
            continue
        place = Fraction(2 * int(fraction or "0", 2) + 1, 2 * 2 ** len(fraction))
        level = (Fraction(1, 10) + Fraction(9, 10) * place) / 10 ** len(zeros)
        assert LEVELS[code] == float(-level if tree[0] == "1" else level)


@given(vectors(specials=False), GROUPS)
def test_dynamic8_rounds_to_a_nearest_level(x, group):
    for start in range(0, len(x), group):
        part = x[start : start + group]
        payload = DYNAMIC8.encode(part, group)
        scale = payload[:2].view(torch.bfloat16).double()
        exact = part.double() / scale if scale else part.double()
        nearest = (exact[:, None] - TABLE).abs().amin(1)
        error = (TABLE[payload[2:].long()] - exact).abs()
        assert bool((error <= nearest + exact.abs() * 2**-18).all())
        assert bits(decoded(DYNAMIC8, payload, len(part), group)) == bits(
            TABLE.float()[payload[2:].long()] * scale.float()
        )


def test_dynamic8_levels_are_exact_and_ties_go_up():
    table = torch.tensor(LEVELS)
    payload = DYNAMIC8.encode(table, 256)
    assert payload.tolist() == [0x80, 0x3F, *range(256)]
    # half of the smallest level is the only tie representable in float32
    half = torch.tensor([1.0, LEVELS[1] / 2, -LEVELS[1] / 2, LEVELS[1] / 2.001, 0, 0, 0, 0])
    assert DYNAMIC8.encode(half, 8)[2:6].tolist() == [128, 1, 129, 0]


def test_dynamic8_error_matches_bitsandbytes():
    """Compare with bitsandbytes 0.50.2, blockwise at block 256, one scale in float32: 0.0108."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 1e-3
    error = decoded(DYNAMIC8, DYNAMIC8.encode(x, 256), len(x), 256) - x
    assert 0.0105 < (error.norm() / x.norm()).item() < 0.0111


def test_payload_and_residual_of_dynamic8_sum_to_the_input_within_rounding():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    kept = torch.linspace(-1, 1, 5000)
    wanted = x + kept
    payload = DYNAMIC8.encode_residual(x, kept, kept, 256)
    torch.testing.assert_close(
        decoded(DYNAMIC8, payload, 5000, 256) + kept, wanted, rtol=2**-23, atol=0
    )


def test_dynamic8_keeps_accuracy_at_both_ends_of_float32():
    for magnitude in (2.0**126, 1.6e38, 2.0**-104):
        x = torch.linspace(-1, 1, 256) * magnitude
        error = decoded(DYNAMIC8, DYNAMIC8.encode(x, 256), 256, 256) - x
        assert (error.double().norm() / x.double().norm()).item() < 0.01


def test_payload_of_dynamic8_has_the_documented_layout():
    x = torch.tensor([2.0, -2.0, 1.0, -0.02, 2e-6, 1e-9, 0.0, -0.0] + [0.0] * 8 + [-4.0])
    assert DYNAMIC8.encode(x, 8).tolist() == [
        *(0x00, 0x40, 0x00, 0x00, 0x80, 0x40),  # bfloat16 2, 0 and 4
        *(0b1_0000000, 0b1_1111111, 0b0_1_011100, 0b1_001_1111, 0b0_0000001, 0, 0, 0),
        *([0] * 8),
        0b1_1111111,
    ]
