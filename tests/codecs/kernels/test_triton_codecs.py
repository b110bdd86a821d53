"""Codecs on Triton's interpreter: their payloads, and the memory that they allocate."""

import itertools
import os

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shardlab.codecs.base import MessageKey
from shardlab.codecs.kernels import native, sign
from shardlab.codecs.registry import make_codec
from shardlab.config.codec_table import all_specs
from tests.codecs.kernels.kernel_vectors import any_bits, bits
from tests.codecs.kernels.triton_served import on_reference, on_triton

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="on a GPU tests/codecs/test_devices.py runs the kernels themselves",
)

KEY = MessageKey(1, 2, "unit", 3)
SPARSE = ("topk", "randomk", "threshold:threshold=3")
OTHERS = [
    name
    for name, spec in all_specs().items()
    if not spec.multi_phase and not name.startswith(("topk", "randomk", "threshold"))
]
SETTINGS = ["int4:levels=nf4", "qsgd:levels=127", "fp8:format=e5m2", "topk:values=int8"]
every_codec = pytest.mark.parametrize("name", [*OTHERS, *SPARSE, *SETTINGS])


def messages(codec, x, residual, in_place):
    """Return all that a codec makes of a vector."""
    before, out = residual.clone(), torch.linspace(-1, 1, len(x))
    kept = before if in_place else torch.empty_like(x)
    sent = codec.encode_residual(x, before, kept, KEY)
    payloads = [sent, codec.encode(x, KEY), sent]
    codec.decode_sum(payloads, out, 1 / 3, [KEY] * 3)
    summed = bits(out)
    codec.decode_add(sent, out, -0.7, KEY)
    return [each.tolist() for each in payloads], bits(kept), summed, bits(out)


@every_codec
@pytest.mark.parametrize("n", [1, 700])
def test_codecs_compute_the_same_bits(name, n):
    codec = make_codec(name)
    wild, normal = any_bits(n, n), torch.randn(n, generator=torch.Generator().manual_seed(n))
    for x, in_place in ((normal, True), (wild, False)):
        expected = messages(codec, x, x.roll(1), in_place)
        with on_triton():
            assert messages(codec, x, x.roll(1), in_place) == expected


@pytest.mark.parametrize("blocks", [1, 2, 3, 1025, 4100])
def test_the_mean_of_many_blocks_is_that_of_the_reference(blocks):
    kernel = native._triton().sign._mean_kernel
    sums = torch.rand(blocks, generator=torch.Generator().manual_seed(blocks))
    folds, mean = torch.empty(-(-blocks // 2), dtype=torch.float64), torch.empty(1)
    kernel[(1,)](sums, folds, mean, blocks, 512 * blocks - 5, BLOCK=1024)
    assert bits(mean) == bits(sign._mean(sums, 512 * blocks - 5))


def largest_allocated(call) -> int:
    """Return the largest memory, in bytes, that a call has at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in changes), initial=0))


@pytest.mark.parametrize("name", [*OTHERS, *SPARSE])
def test_a_message_allocates_its_payload_and_no_vector(name):
    """Beside it: 8 bytes of 512 elements for `sign`; counts of blocks, and what is selected."""
    n, codec = 10_000, make_codec(name)
    x, residual, kept, out = torch.randn(4, n)
    payload, most = codec.encode(x, KEY).clone(), n // 64 + 64
    if name in SPARSE:
        most = n // 16 + 8192 + 24 * codec.content(n, payload).elements
    buffer = torch.empty(codec.payload_bytes(n), dtype=torch.uint8)
    keys = [KEY, KEY]

    def encode() -> None:
        codec.encode(x, KEY)

    def encode_residual() -> None:
        codec.encode_residual(x, residual, kept, KEY, buffer)

    def decode() -> None:
        codec.decode_sum([payload, payload], out, 0.5, keys)

    with on_triton():
        assert largest_allocated(encode) <= len(buffer) + most
        assert largest_allocated(encode_residual) <= most
        assert largest_allocated(decode) <= 2 * most
    # in PyTorch a codec with arithmetic has a vector at least: the count can see one
    if name not in ("none", *SPARSE):
        with on_reference():
            assert largest_allocated(encode_residual) >= 4 * n
