"""Durations of collectives on a cluster, by published formulas.

S is the whole vector in bytes, n the ranks, g those of a node, m the nodes. Every formula is
latency + bytes / rate (Thakur, Rabenseifner and Gropp 2005, Optimization of Collective
Communication Operations in MPICH); the factors of the bytes are those of nccl-tests
(doc/PERFORMANCE.md). Reduce-scatter is a real one: gloo's, which is an all-reduce, serves nowhere
here.
"""

from math import floor, log2

from shardlab.forecast.presets import Cluster


def ring(nbytes: float, ranks: int, cluster: Cluster, passes: int = 1) -> float:
    """Return the seconds of ring all-gather or reduce-scatter (one pass) or all-reduce (two
    passes): (n - 1) steps of S/n per pass.

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
    """Return the seconds of an all-reduce over two trees: t = start + 2 ((g - 1) inside + log2(m)
    between) + 2 S / rate.

    torch/_inductor/comm_analysis.py (`_nccl_algo_time`, tree), after NCCL (src/graph/tuning.cc);
    without the correction that both make for messages of middle size.
    """
    if ranks == 1:
        return 0.0
    nodes = cluster.nodes(ranks)
    inside = ranks // nodes - 1
    latency = 2 * (inside * cluster.step_inside_s + floor(log2(nodes)) * cluster.step_between_s)
    return cluster.start_s + latency + 2 * nbytes / _ring_rate(nodes, ranks, cluster)


def two_levels(nbytes: float, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of an all-gather or reduce-scatter over two levels: S/g between nodes by
    every rank at once, S inside a node.

    The usual decomposition of a collective over two levels; each level is a ring.
    """
    nodes = cluster.nodes(ranks)
    inside = ranks // nodes
    return ring(nbytes / inside, nodes, cluster.across()) + ring(nbytes, inside, cluster)


def two_level_all_reduce(nbytes: float, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of reduce-scatter inside, all-reduce of S/g between nodes, all-gather
    inside."""
    nodes = cluster.nodes(ranks)
    inside = ranks // nodes
    between = nbytes / inside, nodes, cluster.across()
    return 2 * ring(nbytes, inside, cluster) + min(
        ring(*between, passes=2), tree_all_reduce(*between)
    )


def all_to_all(nbytes: float, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of an all-to-all of S/n to every other rank: n - 1 messages (Thakur et al.
    2005, pairwise).

    What goes to other nodes passes the rank's own share of the interfaces, (n - g)/n of S: with 8
    ranks per node nearly 8 times as many bytes as a ring sends there.
    """
    if ranks == 1:
        return 0.0
    inside = min(cluster.ranks_per_node, ranks)
    away = ranks - inside
    latency = (inside - 1) * cluster.step_inside_s + away * cluster.step_between_s
    # NVLink and the network work concurrently
    moving = max((inside - 1) / cluster.inside, away / cluster.between)
    return cluster.start_s + latency + nbytes / ranks * moving


def gather_or_scatter(nbytes: float, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of all-gather or reduce-scatter by the faster algorithm, as libraries
    choose."""
    return min(ring(nbytes, ranks, cluster), two_levels(nbytes, ranks, cluster))


def all_reduce(nbytes: float, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of all-reduce by the fastest algorithm."""
    return min(
        ring(nbytes, ranks, cluster, passes=2),
        tree_all_reduce(nbytes, ranks, cluster),
        two_level_all_reduce(nbytes, ranks, cluster),
    )


def _ring_rate(nodes: int, ranks: int, cluster: Cluster) -> float:
    if nodes == 1:
        return cluster.inside
    return min(cluster.inside, cluster.between * (ranks / nodes))
