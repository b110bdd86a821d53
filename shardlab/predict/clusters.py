"""Clusters that nobody measured: presets with their sources, and closed forms of collectives.

S bytes, n ranks on m nodes with g ranks each. The fastest algorithm counts, as libraries choose.
"""

from math import floor, inf, log2
from typing import NamedTuple

from shardlab.core.errors import UserError, nearest
from shardlab.results.calibration_record import Operation

_GIGABIT = 1e9 / 8
_TCP_LATENCY_S = 25e-6
"""latency of one message between two processes over Ethernet and kernel TCP: our assumption"""
_START_S = 6.6e-6
_NVLINK_S, _NETWORK_S = 0.6e-6, 2.7e-6
"""start of a collective, a step over NVLink and a step over the network, protocol LL: NCCL
(src/graph/tuning.cc), as in torch/_inductor/comm_analysis.py and
torch/distributed/tensor/_collective_utils.py"""


class Cluster(NamedTuple):
    """A cluster of equal nodes; all rates are bytes per second of one rank in one direction."""

    ranks_per_node: int
    inside: float
    """rate inside a node"""
    between: float
    """a rank's share of the network interfaces of its node"""
    start_s: float
    """start latency of any collective"""
    step_inside_s: float
    step_between_s: float
    busy: float
    """fraction of the compute throughput that communication takes while both run"""
    copies: float
    """rate between host memory and a rank's device"""
    memory: float
    """a rank's share of host memory bandwidth, reads plus writes"""
    source: str

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes that this many ranks fill."""
        return -(-ranks // self.ranks_per_node)

    def across(self) -> "Cluster":
        """Return the cluster of one rank of each node, which has its share of the interfaces."""
        return self._replace(ranks_per_node=1, inside=self.between)

    def unlimited(self) -> "Cluster":
        """Return the cluster with connections and host memory that take no time."""
        unlimited = self._replace(inside=inf, between=inf, copies=inf, memory=inf, busy=0.0)
        return unlimited._replace(start_s=0.0, step_inside_s=0.0, step_between_s=0.0)


def _ethernet(gigabits: float) -> Cluster:
    """Return a cluster with one rank per node."""
    rate = gigabits * _GIGABIT * 1448 / 1514
    return Cluster(
        ranks_per_node=1,
        inside=rate,
        between=rate,
        start_s=0.0,
        step_inside_s=_TCP_LATENCY_S,
        step_between_s=_TCP_LATENCY_S,
        busy=0.02,
        copies=25e9,
        memory=204.8e9,
        source=f"{gigabits:g} Gbit/s Ethernet, one rank per node, full bisection; frames of 1514 "
        "bytes with 1448 of payload; 25 us per TCP message; copies at 25 GB/s (PCIe 4 x16), host "
        "memory at 204.8 GB/s (8 channels of DDR4-3200)",
    )


_DGX_A100 = Cluster(
    ranks_per_node=8,
    inside=240e9,
    between=25e9,
    start_s=_START_S,
    step_inside_s=_NVLINK_S,
    step_between_s=_NETWORK_S,
    busy=0.15,
    copies=25e9,
    memory=51.2e9,
    source="DGX A100: 8 GPUs, NVLink 3 at 240 GB/s, one HDR InfiniBand port of 200 Gbit/s per "
    "GPU (torch/_inductor/comm_analysis.py); latencies of NCCL; 15 % of computation lost to "
    "communication (Calculon, systems/a100_80g.json, NVLink); copies at 25 GB/s (PCIe 4 x16), "
    "an eighth of host memory at 409.6 GB/s (16 channels of DDR4-3200)",
)

PRESETS = {
    "ethernet-1g": _ethernet(1),
    "ethernet-10g": _ethernet(10),
    "ethernet-25g": _ethernet(25),
    "ethernet-100g": _ethernet(100),
    "dgx-a100": _DGX_A100,
    "dgx-h100": _DGX_A100._replace(
        inside=370e9,
        between=50e9,
        copies=50e9,
        memory=76.8e9,
        source="DGX H100: 8 GPUs, NVLink 4 at 370 GB/s, one NDR InfiniBand port of 400 Gbit/s per "
        "GPU (torch/_inductor/comm_analysis.py); latencies of NCCL; 15 % of computation lost to "
        "communication (as Calculon has it for NVLink); copies at 50 GB/s (PCIe 5 x16), an eighth "
        "of host memory at 614.4 GB/s (16 channels of DDR5-4800)",
    ),
}


def preset(name: str) -> Cluster:
    """Look up a cluster by name.

    Raises:
        UserError: there is none of that name.
    """
    if name not in PRESETS:
        raise UserError(f"forecast.links: unknown preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]


def collective_seconds(operation: Operation, nbytes: float, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of a collective on a vector of S bytes.

    Reduce-scatter is a real one; gloo's, which is an all-reduce, is used nowhere here.
    """
    if ranks == 1:
        return 0.0
    if operation == "exchange":
        return all_to_all(nbytes, ranks, cluster)
    if operation == "all_reduce":
        return min(
            ring(nbytes, ranks, cluster, passes=2),
            tree_all_reduce(nbytes, ranks, cluster),
            two_levels(nbytes, ranks, cluster, passes=2),
        )
    return min(ring(nbytes, ranks, cluster), two_levels(nbytes, ranks, cluster))


def ring(nbytes: float, ranks: int, cluster: Cluster, passes: int = 1) -> float:
    """Return the seconds of ring all-gather or reduce-scatter (one pass) or all-reduce (two).

    t = start + (steps - k) inside + k between + S (n - 1)/n / rate per pass, with k = m - 1 steps
    per pass that leave a node; torch/_inductor/comm_analysis.py (`_nccl_algo_time`), after NCCL
    (src/graph/tuning.cc). The rings of a node leave it by all of its interfaces, so that the rate
    is that of NVLink or of all of them together, whichever is lower (SimAI, calbusbw.cc).
    """
    if ranks == 1:
        return 0.0
    nodes, steps = cluster.nodes(ranks), passes * (ranks - 1)
    leaving = passes * (nodes - 1)
    seconds = cluster.start_s + (steps - leaving) * cluster.step_inside_s
    seconds += leaving * cluster.step_between_s
    return seconds + nbytes * steps / ranks / _ring_rate(nodes, ranks, cluster)


def tree_all_reduce(nbytes: float, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of an all-reduce over two trees.

    t = start + 2 ((g - 1) inside + log2(m) between) + 2 S / rate; torch/_inductor/comm_analysis.py
    (`_nccl_algo_time`, tree), after NCCL (src/graph/tuning.cc); without the correction that both
    make for messages of middle size.
    """
    if ranks == 1:
        return 0.0
    nodes = cluster.nodes(ranks)
    inside = ranks // nodes - 1
    latency = 2 * (inside * cluster.step_inside_s + floor(log2(nodes)) * cluster.step_between_s)
    return cluster.start_s + latency + 2 * nbytes / _ring_rate(nodes, ranks, cluster)


def two_levels(nbytes: float, ranks: int, cluster: Cluster, passes: int = 1) -> float:
    """Return the seconds of a collective that is S inside a node, then S/g between nodes.

    The usual decomposition of all-gather and reduce-scatter (one pass); an all-reduce (two) has
    the faster of ring and tree between nodes.
    """
    nodes = cluster.nodes(ranks)
    inside = ranks // nodes
    between = nbytes / inside, nodes, cluster.across()
    apart = ring(*between, passes=passes)
    if passes == 2:
        apart = min(apart, tree_all_reduce(*between))
    return passes * ring(nbytes, inside, cluster) + apart


def all_to_all(nbytes: float, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of an all-to-all of S/n to every other rank.

    n - 1 messages (Thakur et al. 2005, pairwise). What goes to other nodes passes the rank's own
    share of the interfaces, (n - g)/n of S: with 8 ranks per node nearly 8 times as many bytes as a
    ring sends there.
    """
    if ranks == 1:
        return 0.0
    inside = min(cluster.ranks_per_node, ranks)
    away = ranks - inside
    latency = (inside - 1) * cluster.step_inside_s + away * cluster.step_between_s
    # NVLink and the network work concurrently
    moving = max((inside - 1) / cluster.inside, away / cluster.between)
    return cluster.start_s + latency + nbytes / ranks * moving


def _ring_rate(nodes: int, ranks: int, cluster: Cluster) -> float:
    if nodes == 1:
        return cluster.inside
    return min(cluster.inside, cluster.between * (ranks / nodes))
