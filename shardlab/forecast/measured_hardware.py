"""Detection of the hardware that a calibration ran on."""

import multiprocessing
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from shardlab.config.calibration_record import Calibration, Transfer
from shardlab.config.hardware import Connection, Gpu, Hardware
from shardlab.engines.cpu_placement import SYSFS, read_topology


def detect(calibration: Calibration, root: Path = SYSFS) -> Hardware:
    """Return the hardware of this machine; rates are those of its calibration.

    Args:
        root: where sysfs is.
    """
    host = calibration.host
    copies = [each for each in calibration.memory if each.operation == "copy"]
    largest = max(copies, key=lambda each: each.nbytes, default=None)
    return Hardware(
        cpu=host["cpu"],
        cores=host["cores"],
        numa_nodes=len(read_topology(root=root).memory_nodes) or 1,
        caches_kb=_caches(root / "devices/system/cpu/cpu0/cache"),
        memory_gb=host["memory_bytes"] / 1e9,
        # read and written
        copy_gb_per_s=2 * largest.nbytes / min(largest.seconds) / 1e9 if largest else None,
        gpus=_gpus(),
        connections=_connections(calibration.transfers),
    )


def _caches(folder: Path) -> dict[str, int]:
    """Read the sizes of caches (Documentation/ABI/testing/sysfs-devices-system-cpu)."""
    found = {}
    for cache in sorted(folder.glob("index[0-9]*")):
        level, kind, size = ((cache / name).read_text().strip() for name in _CACHE_FILES)
        found[f"L{level} {kind.lower()}"] = int(size.removesuffix("K"))
    return found


_CACHE_FILES = ("level", "type", "size")


def _gpus() -> list[Gpu]:
    """Ask CUDA in a fork of this process: after that, it cannot fork ranks that use CUDA."""
    count = torch.cuda.device_count()
    if not count:
        return []
    with multiprocessing.get_context("fork").Pool(1) as child:
        return [Gpu(**facts) for facts in child.apply(_asked, (count,))]


def _asked(count: int) -> list[dict[str, Any]]:
    numbers, link = range(count), None
    if count > 1:  # torch tells no NVLink from PCIe
        direct = all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(numbers, 2))
        link = "peer access" if direct else "no peer access"
    found = [torch.cuda.get_device_properties(number) for number in numbers]
    return [
        {"name": each.name, "memory_gb": each.total_memory / 1e9, "link": link} for each in found
    ]


def _connections(transfers: list[Transfer]) -> list[Connection]:
    found: dict[tuple[int, str], Connection] = {}
    exchanges = [each for each in transfers if each.operation == "exchange"]
    for each in sorted(exchanges, key=lambda each: each.nbytes):
        where = each.world_size, each.link
        seconds = min(each.seconds)
        smallest = found[where].latency_us if where in found else seconds * 1e6
        found[where] = Connection(
            world_size=each.world_size,
            link=each.link,
            mb_per_s=each.wire_bytes / seconds / 1e6,
            latency_us=smallest,
        )
    return [*found.values()]
