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
    """Fail where the device decodes the payloads of the CPU to other values, or loses something."""
    codec = make_codec(spec)
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e-3
    residual = torch.linspace(-1e-4, 1e-4, n)
    payloads = [codec.encode(x.flip(0), key) for key in KEYS]
    for ranks in (1, 3):
        sums = torch.ones(n), torch.ones(n, device=device)
        for out in sums:
            received = [payload.to(out.device) for payload in payloads[:ranks]]
            codec.decode_sum(received, out, 1 / ranks, KEYS[:ranks])
        torch.testing.assert_close(sums[1].cpu(), sums[0], rtol=1e-6, atol=1e-12)
    kept = residual.to(device, copy=True)
    payload = codec.encode_residual(x.to(device), kept, kept, KEYS[0])
    assert payload.device.type == device.type, spec
    decoded = codec.decode(payload, n, KEYS[0])
    torch.testing.assert_close((decoded + kept).cpu(), x + residual, rtol=1e-5, atol=1e-8)
    # arithmetic that rounds otherwise may change single codes, not how much is lost
    expected = codec.decode(codec.encode_residual(x, residual, residual, KEYS[0]), n, KEYS[0])
    error = (decoded.cpu() - expected).norm()
    assert error <= 1e-2 * expected.norm(), spec


if __name__ == "__main__":
    for each in SPECS:
        for size in (1, 127, 4096):
            compare(each, size, torch.device(sys.argv[1]))
    print(f"{len(SPECS)} codecs")
