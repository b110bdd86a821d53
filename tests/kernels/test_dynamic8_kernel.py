from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.kernels.dynamic8 import KERNEL, LEVELS
from tests.kernels.kernel_vectors import bits, vectors

GROUPS = st.sampled_from([8, 16, 256, 1000, 4096])
TABLE = torch.tensor(LEVELS).double()


def decoded(payload, n, group):
    out = torch.zeros(n)
    KERNEL.decode_add(payload, group, out)
    return out


def test_levels_are_those_of_the_tree():
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
def test_every_element_goes_to_a_nearest_level(x, group):
    for start in range(0, len(x), group):
        part = x[start : start + group]
        payload = KERNEL.encode(part, group)
        scale = payload[:2].view(torch.bfloat16).double()
        exact = part.double() / scale if scale else part.double()
        nearest = (exact[:, None] - TABLE).abs().amin(1)
        error = (TABLE[payload[2:].long()] - exact).abs()
        assert bool((error <= nearest + exact.abs() * 2**-18).all())
        assert bits(decoded(payload, len(part), group)) == bits(
            TABLE.float()[payload[2:].long()] * scale.float()
        )


def test_every_level_survives_the_way_there_and_back_and_ties_go_up():
    table = torch.tensor(LEVELS)
    payload = KERNEL.encode(table, 256)
    assert payload.tolist() == [0x80, 0x3F, *range(256)]
    # half of the smallest level is the only tie that float32 can tell
    half = torch.tensor([1.0, LEVELS[1] / 2, -LEVELS[1] / 2, LEVELS[1] / 2.001, 0, 0, 0, 0])
    assert KERNEL.encode(half, 8)[2:6].tolist() == [128, 1, 129, 0]


def test_error_on_gaussian_gradients_is_that_of_bitsandbytes():
    """Blockwise 8-bit of bitsandbytes 0.50.2 at block 256, one scale in float32: 0.0108."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 1e-3
    error = decoded(KERNEL.encode(x, 256), len(x), 256) - x
    assert 0.0105 < (error.norm() / x.norm()).item() < 0.0111


def test_what_is_sent_and_kept_add_up_up_to_a_rounding():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    kept = torch.linspace(-1, 1, 5000)
    wanted = x + kept
    payload = KERNEL.encode_residual(x, kept, kept, 256)
    torch.testing.assert_close(decoded(payload, 5000, 256) + kept, wanted, rtol=2**-23, atol=0)


def test_a_group_with_a_nan_or_infinity_or_huge_value_decodes_to_nan_alone():
    for bad in (float("nan"), float("inf"), -float("inf"), 2.0**127, -3e38):
        x = torch.ones(24)
        x[9] = bad
        kept = torch.full((24,), 0.25)
        out = decoded(KERNEL.encode_residual(x, kept, kept, 8), 24, 8)
        assert out[8:16].isnan().all()
        assert out[:8].isfinite().all() and out[16:].isfinite().all()
        assert kept[8:16].tolist() == [0.25] * 8


def test_magnitudes_near_both_ends_of_float32_keep_their_accuracy():
    for magnitude in (2.0**126, 1.6e38, 2.0**-104):
        x = torch.linspace(-1, 1, 256) * magnitude
        error = decoded(KERNEL.encode(x, 256), 256, 256) - x
        assert (error.double().norm() / x.double().norm()).item() < 0.01


def test_the_payload_is_laid_out_as_documented():
    x = torch.tensor([2.0, -2.0, 1.0, -0.02, 2e-6, 1e-9, 0.0, -0.0] + [0.0] * 8 + [-4.0])
    assert KERNEL.encode(x, 8).tolist() == [
        *(0x00, 0x40, 0x00, 0x00, 0x80, 0x40),  # bfloat16 2, 0 and 4
        *(0b1_0000000, 0b1_1111111, 0b0_1_011100, 0b1_001_1111, 0b0_0000001, 0, 0, 0),
        *([0] * 8),
        0b1_1111111,
    ]
