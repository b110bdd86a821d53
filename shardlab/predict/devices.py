"""Devices to rent and connections inside their nodes, with sources; clusters that consist of them.

Peaks are of dense matrix products with sums in float32, without sparsity. What of a peak a step
reaches is no data-sheet figure: `EFFICIENCY_ROWS` are public measurements of it. The documents of
devices of 2025 and later were read as public projects quote them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardlab.core.errors import UserError
from shardlab.predict.clusters import PRESETS, Cluster
from shardlab.predict.costs import FRAMING

_GIB, _TERA, _GB = 2**30, 1e12, 1e9


class Device(NamedTuple):
    """A device of a training node."""

    memory: float
    """bytes"""
    peaks: Mapping[str, float]
    """operations per second by type of computation, the one to take first"""
    bandwidth: float
    """bytes per second of its memory"""
    copies: float
    """bytes per second between host memory and the device, in one direction"""
    inside: str
    """connection inside a node where none is named"""
    source: str
    nvlink: str = ""
    """generation that `nvlink` means"""


_PCIE4, _PCIE5 = 25e9, 50e9
"""as in `shardlab.predict.clusters`"""


def _nvidia(
    memory_gib: float, peaks: tuple[float, float], bandwidth_gb: float, inside: str, source: str
) -> Device:
    narrow, wide = peaks
    nvlink = inside if inside.startswith("nvlink") else ""
    copies = _PCIE5 if inside in {"nvlink4", "nvlink5", "pcie5"} else _PCIE4
    by_type = {"bf16": narrow * _TERA, "fp32": wide * _TERA}
    rates = bandwidth_gb * _GB, copies
    return Device(memory_gib * _GIB, by_type, *rates, inside, source, nvlink)


_A100 = "NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf), SXM"
_ADA = "NVIDIA Ada GPU architecture white paper 2.1 and data sheet"
_BLACKWELL = "NVIDIA Blackwell Architecture Technical Brief, table 3"


def _instinct(memory_gib: float, peaks: tuple[float, float], rate_gb: float, source: str) -> Device:
    narrow, wide = peaks
    by_type = {"bf16": narrow * _TERA, "fp32": wide * _TERA}
    return Device(memory_gib * _GIB, by_type, rate_gb * _GB, _PCIE5, "xgmi", source)


DEVICES: Mapping[str, Device] = {
    "a100-40g": _nvidia(40, (312, 19.5), 1555, "nvlink3", _A100),
    "a100-80g": _nvidia(80, (312, 19.5), 2039, "nvlink3", _A100),
    "h100-80g": _nvidia(80, (989, 67), 3350, "nvlink4", "nvidia.com/en-us/data-center/h100, SXM"),
    "h200": _nvidia(141, (989, 67), 4800, "nvlink4", "nvidia.com/en-us/data-center/h200, SXM"),
    # GB200 and GB300 are left out: quotations of table 3 differ in the peaks of the first, and host
    # memory behind NVLink-C2C is not what a plan assumes of a node
    "b200": _nvidia(180, (2250, 75), 7700, "nvlink5", f"{_BLACKWELL}, HGX B200"),
    "b300": _nvidia(270, (2250, 75), 7700, "nvlink5", f"{_BLACKWELL}, HGX B300"),
    "l4": _nvidia(24, (121, 30.3), 300, "pcie4", f"{_ADA} of the L4"),
    "l40s": _nvidia(48, (362, 91.6), 864, "pcie4", f"{_ADA} of the L40S"),
    "rtx4090": _nvidia(24, (165.2, 82.6), 1008, "pcie4", f"{_ADA}, appendix A"),
    "rtx5090": _nvidia(
        32, (209.5, 104.8), 1792, "pcie5", "NVIDIA RTX Blackwell GPU architecture, table 3"
    ),
    "rtx-pro-6000": _nvidia(
        96,
        (503.8, 125),
        1792,
        "pcie5",
        "NVIDIA RTX Blackwell PRO GPU architecture 1.0, table 4, Workstation Edition",
    ),
    "v100-32g": Device(
        memory=32 * _GIB,
        peaks={"fp16": 125 * _TERA, "fp32": 15.7 * _TERA},
        bandwidth=900 * _GB,
        copies=_PCIE4 / 2,
        inside="nvlink2",
        source="NVIDIA V100 data sheet (volta-v100-datasheet-update-us-1165301-r5.pdf), SXM2",
        nvlink="nvlink2",
    ),
    "mi300x": _instinct(
        192, (1307.4, 163.4), 5300, "amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
    ),
    "mi350x": _instinct(
        288, (2309.6, 144.2), 8000, "AMD Instinct MI350X GPU data sheet, LE-92701-00"
    ),
    "mi355x": _instinct(
        288, (2516.6, 157.3), 8000, "AMD Instinct MI355X GPU data sheet, LE-92703-00"
    ),
}

_TOPOLOGY = "src/graph/topo.h of NCCL"
INSIDE: Mapping[str, tuple[float, str]] = {
    "nvlink2": (6 * 20.0e9, f"6 links of SM70_NVLINK_BW, {_TOPOLOGY}"),
    "nvlink3": (12 * 20.0e9, f"12 links of SM80_NVLINK_BW, {_TOPOLOGY}"),
    "nvlink4": (18 * 20.6e9, f"18 links of SM90_NVLINK_BW, {_TOPOLOGY}"),
    "nvlink5": (18 * 40.1e9, f"18 links of SM100_NVLINK_BW, {_TOPOLOGY}"),
    "xgmi": (7 * 48.0e9, "7 links of GFX94X_XGMI_WIDTH, and GFX95X, src/graph/topo.h of RCCL"),
    "pcie3": (12e9, f"PCI_BW of 16 lanes, {_TOPOLOGY}"),
    "pcie4": (24e9, f"twice PCI_BW, {_TOPOLOGY}"),
    "pcie5": (48e9, f"four times PCI_BW, {_TOPOLOGY}"),
}
"""bytes per second that a device sends to the others of its node in a collective, and the source"""


class EfficiencyRow(NamedTuple):
    """Public measurement of the share of the peak that a step computes at, recomputation included,
    on one node."""

    device: str
    dtype: str
    parameters: float
    achieved: float


ROWS_SOURCE = (
    "mosaicml/llm-foundry, scripts/train/benchmarking/README.md at 061f2c7: MPT, FSDP on one node "
    "of 8, 2048 tokens, HFU"
)


def _rows(device: str, achieved: Mapping[float, float]) -> list[EfficiencyRow]:
    return [EfficiencyRow(device, "bf16", size * 1e9, hfu / 100) for size, hfu in achieved.items()]


EFFICIENCY_ROWS = [
    *_rows(
        "a100-40g",
        {0.125: 42.75, 0.356: 49.17, 0.76: 52.89, 1.32: 56.23, 2.65: 57.82, 6.66: 67.89}
        | {12.85: 58.58},
    ),
    *_rows(
        "a100-80g",
        {0.125: 44.45, 0.356: 51.62, 0.76: 56.85, 1.32: 59.86, 2.65: 62.11, 6.66: 64.23}
        | {12.85: 59.57, 29.98: 73.74},
    ),
    *_rows("h100-80g", {0.76: 34.9, 1.32: 41.82, 6.66: 46.44, 12.85: 39.79, 29.98: 50.82}),
]
"""never scored by `benchmarks.plans`"""
_SAME_CHIP = {"h200": "h100-80g"}
"""device whose rows count for another one, which computes with the same chip"""
_NEAR = 4.0
"""factor in parameters up to which a row is of the size of a model"""


class Efficiency(NamedTuple):
    """Range of the share of the peak that steps without communication compute at."""

    low: float
    high: float
    basis: str
    """in words"""


def efficiency(
    device: str, dtype: str, parameters: float, rows: Sequence[EfficiencyRow] = EFFICIENCY_ROWS
) -> Efficiency:
    """Return the range of public rows of models of about this size; of other devices where this
    one has none."""

    def distance(row: EfficiencyRow) -> float:
        return abs(math.log(row.parameters / parameters))

    chip = _SAME_CHIP.get(device, device)
    own = [row for row in rows if (row.device, row.dtype) == (chip, dtype)]
    among = own or rows
    # between two rows there is always one on either side
    nearest = sorted(among, key=distance)[:2]
    near = [row for row in among if row in nearest or distance(row) <= math.log(_NEAR)]
    shares = [row.achieved for row in near]
    basis = f"{len(near)} public rows" + (f" of {chip}" if own and chip != device else "")
    if not own:
        basis += f" of other devices: there is none of {device} in {dtype}"
    if parameters * _NEAR < min(row.parameters for row in near):
        basis += ", all of larger models"
    return Efficiency(min(shares), max(shares), basis)


_NODE_MEMORY = 409.6e9
"""bytes per second of host memory, reads and writes: 16 channels of DDR4-3200, as of a DGX A100"""
_DELAY_S = 25e-6
"""latency of a message between nodes, as of Ethernet in `shardlab.predict.clusters`"""


def inside_rate(name: str, device: Device) -> float:
    """Return the bytes per second of a device of a connection by name.

    Raises:
        UserError: there is none of that name.
    """
    full = device.nvlink if name == "nvlink" and device.nvlink else name
    if full not in INSIDE:
        known = ", ".join([*(["nvlink"] if device.nvlink else []), *INSIDE])
        raise UserError(f"--inside {name!r}: known are {known}, and rates such as 100gbit")
    return INSIDE[full][0]


def between_rate(bits_per_second: float, per_node: int) -> float:
    """Return the bytes per second of payload that are a device's share of the link of its node."""
    return bits_per_second / 8 / per_node / FRAMING


def cluster_of(
    device: Device, per_node: int, inside: float, bits_per_second: float, delay_s: float = _DELAY_S
) -> Cluster:
    """Return a cluster of equal nodes, whose devices share the interfaces of their node.

    Args:
        inside: bytes per second of a device to the others of its node.
        bits_per_second: of the link of a node, in one direction.
    """
    return PRESETS["dgx-a100"]._replace(
        ranks_per_node=per_node,
        inside=inside,
        between=between_rate(bits_per_second, per_node),
        step_between_s=delay_s,
        busy=PRESETS["ethernet-10g"].busy,  # NVLink's share is in the efficiency of whole nodes
        copies=device.copies,
        memory=_NODE_MEMORY / per_node,
        source=device.source,
    )
