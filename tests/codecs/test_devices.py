"""Payloads have the same bytes on every device."""

import pytest
import torch

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from tests.codecs.codec_examples import SPECS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

KEY = MessageKey(seed=1, step=2, unit="block", rank=3)


@pytest.mark.parametrize("n", [1, 127, 128, 4096, 1_000_003])
@pytest.mark.parametrize("spec", SPECS)
def test_gpu_matches_cpu_bit_for_bit(spec, n):
    codec = make_codec(spec)
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e-3
    residual = torch.linspace(-1e-4, 1e-4, n)
    ours, theirs = residual.clone(), residual.cuda()
    payload, on_gpu = (
        codec.encode_residual(x, ours, ours, KEY),
        codec.encode_residual(x.cuda(), theirs, theirs, KEY),
    )
    assert on_gpu.is_cuda and torch.equal(payload, on_gpu.cpu())
    assert torch.equal(ours, theirs.cpu())
    assert torch.equal(codec.decode(payload, n, KEY), codec.decode(on_gpu, n, KEY).cpu())
