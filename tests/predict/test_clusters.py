"""Closed forms of collectives on clusters: torch's formulas, bus bandwidths, monotony."""

from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import _collective_utils as torch_costs

from shardlab.core.errors import UserError
from shardlab.predict import clusters
from shardlab.predict.clusters import PRESETS, Cluster, collective_seconds, preset
from shardlab.results.calibration_record import Operation

FLAT = Cluster(8, 87.7e9, 87.7e9, 6.6e-6, 0.6e-6, 0.6e-6, 0.0, 0.0, 0.0, "one node as in torch")
BYTES, RANKS = st.floats(1, 1e10), st.integers(2, 16384)


@given(BYTES, st.integers(2, 8))
def test_ring_matches_the_formulas_of_torch(nbytes, ranks):
    mesh = SimpleNamespace(
        mesh_dim_devices=[ranks], mesh_dim_bandwidth=[87.7], mesh_dim_latency=[0.6]
    )
    gather = torch_costs.allgather_cost(nbytes / 1e9, mesh, 0)
    both = torch_costs.allreduce_cost(nbytes / 1e9, mesh, 0)
    assert 1e6 * clusters.ring(nbytes, ranks, FLAT) == pytest.approx(gather)
    assert 1e6 * clusters.ring(nbytes, ranks, FLAT, passes=2) == pytest.approx(both)


@pytest.mark.parametrize("operation", get_args(Operation))
@given(nbytes=BYTES, ranks=RANKS, name=st.sampled_from(list(PRESETS)), more=st.floats(1, 10))
def test_durations_grow_with_bytes_and_are_0_for_one_rank(operation, nbytes, ranks, name, more):
    cluster = PRESETS[name]
    size = max(ranks // cluster.ranks_per_node, 1) * min(ranks, cluster.ranks_per_node)
    short = collective_seconds(operation, nbytes, size, cluster)
    assert 0 < short <= collective_seconds(operation, more * nbytes, size, cluster) * (1 + 1e-12)
    assert collective_seconds(operation, nbytes, 1, cluster) == 0


def test_two_levels_reduce_latency_and_a_tree_reduces_it_more():
    cluster = PRESETS["dgx-h100"]
    ring = clusters.ring(1e3, 16384, cluster)
    assert clusters.two_levels(1e3, 16384, cluster) < ring / 2
    assert clusters.tree_all_reduce(1e3, 16384, cluster) < ring / 100


def test_all_to_all_sends_more_between_nodes_than_a_ring():
    """VeOmni 1167: with 8 ranks per node nearly 8 times as much."""
    cluster = PRESETS["dgx-a100"]._replace(
        inside=1e15, start_s=0, step_inside_s=0, step_between_s=0
    )
    exchange = clusters.all_to_all(1e12, 64, cluster)
    assert exchange / clusters.ring(1e12, 64, cluster) == pytest.approx(8 * 56 / 63)


def test_a_reduce_scatter_is_half_an_all_reduce():
    cluster = PRESETS["ethernet-10g"]
    half, whole = (
        collective_seconds(way, 1e9, 64, cluster) for way in ("reduce_scatter", "all_reduce")
    )
    assert half == pytest.approx(whole / 2, rel=0.02)


def test_unknown_preset_is_refused():
    with pytest.raises(UserError, match=r"unknown preset 'ethernet-10'; .*ethernet-10g"):
        preset("ethernet-10")
