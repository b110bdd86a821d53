"""Presets of clusters: rates and latencies, each with its source."""

from typing import NamedTuple

from shardlab.core.errors import UserError, nearest

_GIGABIT = 1e9 / 8
_TCP_LATENCY_S = 25e-6
"""latency of one message between two processes over Ethernet and kernel TCP: our assumption"""
_DISK = 3e9
"""disk bytes per second of a rank, one NVMe drive: our assumption"""
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
    disk: float
    source: str

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes that this many ranks fill."""
        return -(-ranks // self.ranks_per_node)

    def across(self) -> "Cluster":
        """Return the cluster of one rank of each node, which has its share of the interfaces."""
        return self._replace(ranks_per_node=1, inside=self.between)


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
        disk=_DISK,
        source=f"{gigabits:g} Gbit/s Ethernet, one rank per node, full bisection; frames of 1514 "
        "bytes with 1448 of payload; 25 us per TCP message; copies at 25 GB/s (PCIe 4 x16), host "
        "memory at 204.8 GB/s (8 channels of DDR4-3200), a disk at 3 GB/s",
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
    disk=_DISK,
    source="DGX A100: 8 GPUs, NVLink 3 at 240 GB/s, one HDR InfiniBand port of 200 Gbit/s per "
    "GPU (torch/_inductor/comm_analysis.py); latencies of NCCL; 15 % of computation lost to "
    "communication (Calculon, systems/a100_80g.json, NVLink); copies at 25 GB/s (PCIe 4 x16), "
    "an eighth of host memory at 409.6 GB/s (16 channels of DDR4-3200), a disk at 3 GB/s",
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
        "of host memory at 614.4 GB/s (16 channels of DDR5-4800), a disk at 3 GB/s",
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
