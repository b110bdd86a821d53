from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import _collective_utils as torch_costs

from shardlab.core.errors import UserError
from shardlab.forecast import collectives
from shardlab.forecast.presets import PRESETS, Cluster, preset

FLAT = Cluster(
    8, 87.7e9, 87.7e9, 6.6e-6, 0.6e-6, 0.6e-6, 0.0, 0.0, 0.0, 0.0, "one node as torch has it"
)
BYTES, RANKS = st.floats(1, 1e10), st.integers(2, 16384)
FORMULAS = [
    collectives.ring,
    collectives.tree_all_reduce,
    collectives.two_levels,
    collectives.two_level_all_reduce,
    collectives.all_to_all,
    collectives.gather_or_scatter,
    collectives.all_reduce,
]


def topology(ranks, latency_us=0.6, gigabytes=87.7):
    return SimpleNamespace(
        mesh_dim_devices=[ranks], mesh_dim_bandwidth=[gigabytes], mesh_dim_latency=[latency_us]
    )


@given(BYTES, st.integers(2, 8))
def test_ring_matches_the_formulas_of_torch(nbytes, ranks):
    where = topology(ranks)
    gather = torch_costs.allgather_cost(nbytes / 1e9, where, 0)
    scatter = torch_costs.reduce_scatter_cost(nbytes / 1e9, where, 0)
    both = torch_costs.allreduce_cost(nbytes / 1e9, where, 0)
    assert 1e6 * collectives.ring(nbytes, ranks, FLAT) == pytest.approx(gather)
    assert gather == scatter
    assert 1e6 * collectives.ring(nbytes, ranks, FLAT, passes=2) == pytest.approx(both)


@given(BYTES, st.integers(2, 64))
def test_ring_of_single_rank_nodes_matches_torch_between_hosts(nbytes, nodes):
    cluster = FLAT._replace(ranks_per_node=1, between=0.22 * 87.7e9, step_between_s=2.7e-6)
    cluster = cluster._replace(inside=cluster.between, step_inside_s=2.7e-6)
    reported = torch_costs.allgather_cost(nbytes / 1e9, topology(nodes, 2.7, 0.22 * 87.7), 0)
    assert 1e6 * collectives.ring(nbytes, nodes, cluster) == pytest.approx(reported)


@pytest.mark.parametrize("ranks", [2, 8])
def test_bus_bandwidth_is_that_of_nccl_tests(ranks):
    """doc/PERFORMANCE.md: S/t (n-1)/n for all-gather, S/t 2(n-1)/n for all-reduce."""
    nbytes, fast = 1e15, FLAT
    gather = collectives.ring(nbytes, ranks, fast)
    both = collectives.ring(nbytes, ranks, fast, passes=2)
    assert nbytes / gather * (ranks - 1) / ranks == pytest.approx(fast.inside)
    assert nbytes / both * 2 * (ranks - 1) / ranks == pytest.approx(fast.inside)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: f.__name__)
@given(nbytes=BYTES, ranks=RANKS, name=st.sampled_from(list(PRESETS)), more=st.floats(1, 10))
def test_durations_grow_with_bytes_and_are_0_for_one_rank(formula, nbytes, ranks, name, more):
    cluster = PRESETS[name]
    size = max(ranks // cluster.ranks_per_node, 1) * min(ranks, cluster.ranks_per_node)
    short = formula(nbytes, size, cluster)
    assert 0 < short <= formula(more * nbytes, size, cluster) * (1 + 1e-12)
    assert formula(nbytes, 1, cluster) == 0


def test_two_levels_reduce_latency_and_a_tree_reduces_it_more():
    cluster = PRESETS["dgx-h100"]
    ring = collectives.ring(1e3, 16384, cluster)
    assert collectives.two_levels(1e3, 16384, cluster) < ring / 2
    assert collectives.tree_all_reduce(1e3, 16384, cluster) < ring / 100


def test_all_to_all_sends_more_between_nodes_than_a_ring():
    """VeOmni 1167: with 8 ranks per node nearly 8 times as much."""
    cluster = PRESETS["dgx-a100"]._replace(
        inside=1e15, start_s=0, step_inside_s=0, step_between_s=0
    )
    exchange = collectives.all_to_all(1e12, 64, cluster)
    assert exchange / collectives.ring(1e12, 64, cluster) == pytest.approx(8 * 56 / 63)


def test_a_reduce_scatter_is_half_an_all_reduce():
    cluster = PRESETS["ethernet-10g"]
    both = collectives.ring(1e9, 64, cluster, passes=2)
    assert collectives.gather_or_scatter(1e9, 64, cluster) == pytest.approx(both / 2)


def test_unknown_preset_is_refused():
    with pytest.raises(UserError, match=r"unknown preset 'ethernet-10'; .*ethernet-10g"):
        preset("ethernet-10")
