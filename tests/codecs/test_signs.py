"""Codecs of one bit per element."""

import torch

from shardlab.codecs.registry import make_codec


def test_bits_per_element_are_as_documented():
    n = 512 * 100
    bits = {
        spec: 8 * make_codec(spec).encode(torch.ones(n)).numel() / n
        for spec in ("sign", "efsign:group=512", "onebit:group=512", "efsign:group=128")
    }
    assert bits == {
        "sign": 1 + 32 / n,
        "efsign:group=512": 1 + 16 / 512,
        "onebit:group=512": 1 + 32 / 512,
        "efsign:group=128": 1 + 16 / 128,
    }


def test_vote_differs_from_the_sum_of_payloads():
    codec = make_codec("sign")
    assert codec.votes
    ranks = [torch.tensor(x) for x in ([4.0, -4.0], [-1.0, -1.0], [-1.0, 1.0])]
    payloads = [codec.encode(x) for x in ranks]
    voted = torch.empty(2)
    codec.decode_sum(payloads, voted, 1 / 3)
    assert voted.tolist() == [-2.0, -2.0]
    summed = torch.zeros(2)
    for payload in payloads:
        codec.decode_add(payload, summed, 1 / 3)
    torch.testing.assert_close(summed, torch.tensor([2 / 3, -4 / 3]))


def test_error_feedback_compensates_one_bit():
    """Compare the mean of many payloads with a single one."""
    x = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    for spec in ("sign", "efsign:group=128", "onebit:group=128"):
        codec = make_codec(spec)
        residual, sent = torch.zeros_like(x), torch.zeros_like(x)
        for _ in range(200):
            codec.decode_add(codec.encode_residual(x, residual, residual), sent, 1 / 200)
        once = (codec.decode(codec.encode(x), len(x)) - x).norm() / x.norm()
        assert (sent - x).norm() / x.norm() < 0.2 * once
