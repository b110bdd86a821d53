"""What `torch.compile` makes of the references decodes to their values."""

import pytest
import torch

from shardlab.codecs.compiled import BACKENDS
from shardlab.codecs.registry import make_codec
from tests.codecs.vectors import coded, reference


def check(spec, backend, monkeypatch, lengths):
    """Compare with the reference that is not compiled, for vectors of several lengths."""
    codec, vectors = make_codec(spec), []
    for n in lengths:
        vectors.append(torch.randn(2, n, generator=torch.Generator().manual_seed(n)) * 1e-3)
    with reference():
        expected = [coded(codec, *pair) for pair in vectors]
        monkeypatch.setitem(BACKENDS, "cpu", backend)
        for pair, wanted in zip(vectors, expected, strict=True):
            _, *decoded = coded(codec, *pair)
            for ours, theirs in zip(decoded, wanted[1:], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


FAMILIES = ["fp8", "int4:levels=nf4", "natural", "onebit:group=8", "randomk:density=0.1"]


@pytest.mark.long
@pytest.mark.parametrize("spec", ["int8", "topk", *FAMILIES])
def test_a_whole_graph_is_captured(spec, monkeypatch):
    check(spec, "eager", monkeypatch, lengths=(127, 5001))


@pytest.mark.long
@pytest.mark.parametrize("spec", ["int8", "topk:density=0.1"])
def test_compiled_code_decodes_to_the_same_values(spec, monkeypatch):
    check(spec, "inductor", monkeypatch, lengths=(4096, 5001))
