"""One-bit formats with one or two means of a group."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardlab.codecs.kernels.signs import KERNELS
from tests.codecs.kernels.kernel_vectors import GROUPS, vectors

EFSIGN, ONEBIT = KERNELS["efsign"], KERNELS["onebit"]
both = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def decoded(kernel, payload, n, group):
    out = torch.zeros(n)
    kernel.decode_add(payload, group, out)
    return out


def squares(x):
    return x.double().square().sum().item()


def errors(kernel, x, group):
    return squares(decoded(kernel, kernel.encode(x, group), len(x), group).double() - x.double())


@given(vectors(specials=False), GROUPS)
def test_efsign_contracts_by_the_density_of_the_group(x, group):
    assume(x.numel() and x.abs().max() < 2.0**60)
    for part in x.split(group):
        density = part.abs().double().sum().item() ** 2 / len(part)
        if part.abs().double().mean() < 2.0**-126 * 1.01:
            density = 0.0  # its mean is sent as zero
        # error = |x|^2 - density, up to the rounding of the mean
        assert errors(EFSIGN, part, group) <= squares(part) - density * (1 - 2.0**-16)


@given(vectors(specials=False), GROUPS)
def test_onebit_error_is_at_most_that_of_efsign(x, group):
    assume(x.numel() and 2.0**-60 < x.abs().max() < 2.0**60)
    for part in x.split(group):
        rounding = squares(part) * 2.0**-16
        assert errors(ONEBIT, part, group) <= errors(EFSIGN, part, group) + rounding


@both
@given(data=st.data(), group=GROUPS)
def test_payload_and_residual_sum_to_the_input(kernel, data, group):
    x = data.draw(vectors(specials=False))
    kept = data.draw(vectors(n=len(x), specials=False))
    wanted = x + kept
    assume(bool((wanted.abs() < 2.0**100).all()))
    sent = decoded(kernel, kernel.encode_residual(x, kept, kept, group), len(x), group)
    assert torch.equal(kept, wanted - sent)


def test_onebit_decodes_to_the_means_of_both_signs():
    x = torch.tensor([1.0, -0.5, 3.0, 0.0, -1.5, 0.0, -1.0, 4.0] + [2.0] * 8 + [-3.0, -1.0])
    out = decoded(ONEBIT, ONEBIT.encode(x, 8), 18, 8)
    # 8 / 5 in bfloat16 is 1.6015625
    below, others = -1.0, 1.6015625
    first = [others, below, others, others, below, others, below, others]
    assert out.tolist() == first + [2.0] * 8 + [-2.0, -2.0]


@both
def test_group_with_an_infinite_sum_decodes_to_nan(kernel):
    out = decoded(kernel, kernel.encode(torch.full((8,), 3e38), 8), 8, 8)
    assert out.isnan().all()


@both
def test_groups_of_zeros_or_subnormals_decode_to_zeros(kernel):
    x = torch.cat([torch.zeros(8), torch.full((8,), -0.0), torch.full((8,), 1e-40), torch.ones(8)])
    out = decoded(kernel, kernel.encode(x, 8), 32, 8)
    assert out.tolist() == [0.0] * 24 + [1.0] * 8


def test_payload_of_efsign_has_the_documented_layout():
    x = torch.tensor([1.0, -1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, 1, 1, 1, -1, -0.0, 4.0, -2.0])
    assert EFSIGN.encode(x, 16).tolist() == [
        *(0x80, 0x3F, 0x00, 0x40),  # bfloat16 1 and 2
        *(0b00010100, 0b10000001),  # byte j of two holds elements j, j + 2, ...
        0b100,
    ]


def test_payload_of_onebit_has_the_documented_layout():
    x = torch.tensor([1.0, -1, 2, 3, -3, 2, 2, 2])
    assert ONEBIT.encode(x, 8).tolist() == [
        *(0x00, 0x40, 0x00, 0xC0),  # bfloat16 2 and -2
        0b00010010,
    ]
