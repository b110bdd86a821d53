"""A payload is the same bytes whichever device made it."""

import pytest
import torch

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

KEY = MessageKey(seed=1, step=2, unit="block", rank=3)
SPECS = [
    "none",
    "bf16",
    "fp16",
    "fp8:format=e4m3",
    "fp8:format=e5m2,group=8",
    "int8:group=8",
    "int8:group=128",
    "int8:rounding=stochastic",
    "int4:group=8",
    "int4:group=128",
    "int4:rounding=stochastic",
    "int4:levels=nf4",
    "qsgd:levels=1",
    "qsgd:levels=7",
    "qsgd:levels=127",
    "dynamic8",
    "natural",
SPECS = [
    "none",
    "bf16",
    "int8:group=8",
    "int8:group=128",
    "sign",
    "efsign:group=8",
    "efsign:group=512",
    "onebit:group=8",
    "onebit:group=512",
    "topk:density=0.01",
    "topk:density=0.3",
    "int8:group=8",
    "int8:group=128",
    "topk:density=0.01",
    "topk:density=0.3",
    "topk:density=0.05,values=int8",
    "topk:density=0.2,values=bf16,indices=bitmap",
    "threshold:threshold=0.5,cap=0.1",
    "threshold:threshold=2,values=int8,indices=varint",
    "randomk:density=0.1",
    "randomk:density=0.3,scaled=true",
]


@pytest.mark.parametrize("n", [1, 127, 128, 4096, 1_000_003])
@pytest.mark.parametrize("spec", SPECS)
def test_gpu_and_cpu_agree_bit_for_bit(spec, n):
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
