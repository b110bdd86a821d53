"""Payloads, residuals and sums of codecs on a device, compared with those on the CPU.

`python -m tests.gpu.all_codecs DEVICE` compares all codecs: for compute-sanitizer.
"""

import sys

import torch

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from tests.codecs.codec_examples import SPECS

KEYS = [MessageKey(seed=1, step=2, unit="block", rank=rank) for rank in range(3)]


def compare(spec: str, n: int, device: torch.device) -> None:
    """Fail where a bit differs."""
    codec = make_codec(spec)
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e-3
    residual = torch.linspace(-1e-4, 1e-4, n)
    ours, theirs = residual.clone(), residual.to(device, copy=True)
    payload = codec.encode_residual(x, ours, ours, KEYS[0])
    there = codec.encode_residual(x.to(device), theirs, theirs, KEYS[0])
    assert there.device.type == device.type and torch.equal(payload, there.cpu()), spec
    assert torch.equal(ours, theirs.cpu()), spec
    payloads = [payload, *(codec.encode(x.flip(0), key) for key in KEYS[1:])]
    for ranks in (1, 3):
        sums = torch.ones(n), torch.ones(n, device=device)
        for out in sums:
            given = [each.to(out.device) for each in payloads[:ranks]]
            codec.decode_sum(given, out, 1 / ranks, KEYS[:ranks])
        assert torch.equal(sums[0], sums[1].cpu()), f"{spec}, {ranks} payloads"


if __name__ == "__main__":
    for each in SPECS:
        for size in (1, 127, 4096):
            compare(each, size, torch.device(sys.argv[1]))
    print(f"{len(SPECS)} codecs")
