"""References under `torch.compile` decode to the values of the references."""

import pytest
import torch

from shardlab.codecs.registry import make_codec
from shardlab.kernels.compiled import BACKENDS
from tests.codecs.vectors import coded, reference


def check(spec, backend, monkeypatch, lengths):
    """Compare with the reference that is not compiled, for vectors of several lengths."""
    codec, vectors = make_codec(spec), []
    for n in lengths:
        vectors.append(torch.randn(2, n, generator=torch.Generator().manual_seed(n)) * 1e-3)
    with reference():
        expected = [coded(codec, *pair) for pair in vectors]
        monkeypatch.setitem(BACKENDS, "cpu", backend)
        for pair, reference_result in zip(vectors, expected, strict=True):
            _, *decoded = coded(codec, *pair)
            for result, expected_result in zip(decoded, reference_result[1:], strict=True):
                torch.testing.assert_close(result, expected_result, rtol=1e-6, atol=1e-9)


FAMILIES = ["fp8", "int4:levels=nf4", "natural", "onebit:group=8", "randomk:density=0.1"]


@pytest.mark.long
@pytest.mark.parametrize("spec", ["int8", "topk", *FAMILIES])
def test_a_whole_graph_is_captured(spec, monkeypatch):
    check(spec, "eager", monkeypatch, lengths=(127, 5001))


@pytest.mark.long
@pytest.mark.parametrize("spec", ["int8", "topk:density=0.1"])
def test_compiled_code_decodes_to_the_same_values(spec, monkeypatch):
    check(spec, "inductor", monkeypatch, lengths=(4096, 5001))


@pytest.mark.long
@pytest.mark.parametrize("spec", ["int4:levels=nf4", "qsgd:levels=7", "dynamic8"])
def test_graphs_take_no_table_and_no_setting_as_inputs(spec, monkeypatch):
    """A kernel would load each level for itself, and shift by bits that it does not know."""

    def backend(graph, inputs):
        counts.append(len(inputs))
        assert not any("pow" in str(node.target) for node in graph.graph.nodes)
        return graph

    counts: list[int] = []
    check(spec, backend, monkeypatch, lengths=(5001,))
    # vectors, payloads, a table, lengths, keys and limits of scales
    assert counts
    assert max(counts) <= 12


def as_captured(graph, inputs):
    """Another backend than "eager", for which nothing is compiled yet."""
    return graph


@pytest.mark.long
def test_formats_beyond_the_limit_of_the_process_are_compiled(monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "recompile_limit", 1)
    for spec in ("bf16", "fp16", "efsign:group=8"):
        check(spec, as_captured, monkeypatch, lengths=(512,))
