import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_vectors import bits, from_bits, vectors

from shardlab.kernels.casts import BF16, GROUP


@given(st.data())
def test_sent_and_kept_add_up_to_what_was_given_exactly(data):
    x = data.draw(vectors(specials=False))
    kept = data.draw(vectors(n=len(x), specials=False))
    wanted = x + kept
    assume(bool((wanted.abs() < 2.0**127).all()))
    sent = torch.zeros(len(x))
    BF16.decode_add(BF16.encode_residual(x, kept, kept, GROUP), GROUP, sent)
    assert bits(sent + kept) == bits(wanted + 0.0)


def test_rounds_to_nearest_with_ties_to_even_and_keeps_nan():
    patterns = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFF800000]
    payload = BF16.encode(torch.tensor([from_bits(p) for p in patterns]), GROUP)
    words = payload.view(torch.int16).tolist()
    assert [w & 0xFFFF for w in words] == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80]


def test_a_residual_never_becomes_infinite():
    kept = torch.tensor([1.0, 2.0, 3.0])
    BF16.encode_residual(torch.tensor([float("inf"), float("nan"), 3.4e38]), kept, kept, GROUP)
    assert kept.tolist() == [1.0, 2.0, 3.0]
