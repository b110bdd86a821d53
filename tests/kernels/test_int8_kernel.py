import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardlab.kernels.int8 import KERNEL
from tests.kernels.kernel_vectors import bits, vectors

GROUPS = st.sampled_from([8, 16, 128, 1000, 4096])


def decoded(payload, n, group):
    out = torch.zeros(n)
    KERNEL.decode_add(payload, group, out)
    return out


@given(st.data(), GROUPS)
def test_sent_and_kept_add_up_to_what_was_given_exactly(data, group):
    x = data.draw(vectors(specials=False))
    kept = data.draw(vectors(n=len(x), specials=False))
    wanted = x + kept
    assume(bool((wanted.abs() < 2.0**126).all()))
    payload = KERNEL.encode_residual(x, kept, kept, group)
    assert bits(decoded(payload, len(x), group) + kept) == bits(wanted + 0.0)


@given(vectors(specials=False), GROUPS)
def test_no_element_is_off_by_more_than_half_a_step(x, group):
    for start in range(0, len(x), group):
        part = x[start : start + group]
        step = max(part.abs().max().item() / 127, 2.0**-126) * (1 + 2**-7)
        error = (decoded(KERNEL.encode(part, group), len(part), group) - part).abs().max()
        assert error.item() <= step / 2 * (1 + 2**-20)


def test_a_group_with_a_nan_or_infinity_or_huge_value_decodes_to_nan_alone():
    for bad in (float("nan"), float("inf"), -float("inf"), 2.0**127, -3e38):
        x = torch.ones(24)
        x[9] = bad
        kept = torch.full((24,), 0.25)
        out = decoded(KERNEL.encode_residual(x, kept, kept, 8), 24, 8)
        assert out[8:16].isnan().all()
        assert out[:8].isfinite().all() and out[16:].isfinite().all()
        assert kept[8:16].tolist() == [0.25] * 8


def test_the_payload_is_laid_out_as_documented():
    x = torch.tensor([127.0, -63.5, 0.5, 1.5, 0, 0, 0, 0] + [0.0] * 8 + [254.0])
    assert KERNEL.encode(x, 8).tolist() == [
        *(0x80, 0x3F, 0x00, 0x00, 0x00, 0x40),  # bfloat16 1, 0 and 2
        *(127, 256 - 64, 0, 2, 0, 0, 0, 0),  # ties to even
        *([0] * 8),
        127,
    ]
