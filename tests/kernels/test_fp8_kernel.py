import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardlab.kernels.fp8 import KERNELS
from tests.kernels.kernel_vectors import bits, vectors

GROUPS = st.sampled_from([8, 16, 128, 1000, 4096])
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# largest number, smallest scale, half a unit in the last place, half the smallest number
LIMITS = {"e4m3": (448, 2.0**-116, 2**-4, 2**-10), "e5m2": (57344, 2.0**-109, 2**-3, 2**-17)}
each_format = pytest.mark.parametrize("format", KERNELS)


def decoded(kernel, payload, n, group):
    out = torch.zeros(n)
    kernel.decode_sum([payload], group, out)
    return out


@each_format
def test_every_code_is_torchs_own_of_the_scaled_value(format):
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
@given(data=st.data(), group=GROUPS)
def test_sent_and_kept_add_up_to_what_was_given_exactly(format, data, group):
    x = data.draw(vectors(specials=False))
    kept = data.draw(vectors(n=len(x), specials=False))
    wanted = x + kept
    assume(bool((wanted.abs() < 2.0**126).all()))
    payload = KERNELS[format].encode_residual(x, kept, kept, group)
    sent = decoded(KERNELS[format], payload, len(x), group)
    assert bits(sent + kept) == bits(wanted + 0.0)


@each_format
@given(x=vectors(specials=False), group=GROUPS)
def test_no_element_is_off_by_more_than_half_a_unit_in_the_last_place(format, x, group):
    kernel, (largest, smallest, relative, absolute) = KERNELS[format], LIMITS[format]
    for start in range(0, len(x), group):
        part = x[start : start + group].double()
        scale = max(part.abs().max().item() / largest, smallest) * (1 + 2**-7)
        sent = decoded(kernel, kernel.encode(part.float(), group), len(part), group)
        bound = torch.maximum(part.abs() * relative, torch.tensor(absolute * scale))
        assert bool(((sent.double() - part).abs() <= bound * (1 + 2**-20)).all())


@each_format
def test_a_group_with_a_nan_or_infinity_or_huge_value_decodes_to_nan_alone(format):
    for bad in (float("nan"), float("inf"), -float("inf"), 2.0**127, -3e38):
        x = torch.ones(24)
        x[9] = bad
        kept = torch.full((24,), 0.25)
        payload = KERNELS[format].encode_residual(x, kept, kept, 8)
        out = decoded(KERNELS[format], payload, 24, 8)
        assert out[8:16].isnan().all()
        assert out[:8].isfinite().all() and out[16:].isfinite().all()
        assert kept[8:16].tolist() == [0.25] * 8


@each_format
def test_no_decoded_value_is_subnormal(format):
    kernel, smallest = KERNELS[format], torch.finfo(torch.float32).tiny
    for exponent in range(-149, -90):
        x = torch.linspace(-1, 1, 256) * 2.0**exponent
        sent = decoded(kernel, kernel.encode(x, 256), 256, 256)
        assert bool(((sent == 0) | (sent.abs() >= smallest)).all())


def test_the_payloads_are_laid_out_as_documented():
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
