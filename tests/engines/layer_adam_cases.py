"""Parameters, gradients and training for the tests of LayerAdam."""

import pytest
import torch
from torch import nn

# sizes that torch has no tail of
SIZES = [(64, 16), (64,), (16, 64), (300, 160)]
as_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch rounds otherwise on this processor",
)


def parameters(dtype=torch.float32, sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def groups(given, **options):
    return [{"name": f"layer{i}", "params": [each]} | options for i, each in enumerate(given)]


def with_gradients(given, step):
    generator = torch.Generator().manual_seed(step)
    for each in given:
        each.grad = torch.randn(each.shape, generator=generator).to(each.dtype)
    return given


def train(optimizer, given, steps, first=0):
    for step in range(first, first + steps):
        with_gradients(given, step)
        optimizer.step()
    return given


def alike(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
