"""Costs of single operations on this machine, and its hardware."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.comm.object_collectives import gather_values
from shardlab.comm.transport import Transport
from shardlab.core.cpu_affinity import CpuAffinity
from shardlab.core.files import read_json, temporary, write_json
from shardlab.core.host import CpuMeter, describe_host, git_revision
from shardlab.core.link import connection_name
from shardlab.core.progress import say
from shardlab.kernels import native
from shardlab.kernels.cpu_placement import SYSFS, read_topology
from shardlab.predict.codec_costs import (
    codec_times,
    interleave,
    memory_times,
    phased_times,
    working,
)
from shardlab.results.calibration_record import (
    Calibration,
    MemoryOperation,
    Operation,
    Transfer,
    wire_bytes,
)
from shardlab.results.contention import Contention
from shardlab.results.hardware import Connection, Gpu, Hardware
from shardlab.strategy.codec_table import CODECS, split_text
from shardlab.train.launch import launch


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
    sizes = {}
    for cache in sorted(folder.glob("index[0-9]*")):
        level, kind, size = ((cache / key).read_text().strip() for key in ("level", "type", "size"))
        sizes[f"L{level} {kind.lower()}"] = int(size.removesuffix("K"))
    return sizes


def _gpus() -> list[Gpu]:
    numbers = range(torch.cuda.device_count())
    link = None
    if len(numbers) > 1:  # torch tells no NVLink from PCIe
        direct = all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(numbers, 2))
        link = "peer access" if direct else "no peer access"
    found = [torch.cuda.get_device_properties(number) for number in numbers]
    return [Gpu(name=each.name, memory_gb=each.total_memory / 1e9, link=link) for each in found]


def _connections(transfers: Sequence[Transfer]) -> list[Connection]:
    """Return rate and latency of each link: those of the largest and the smallest exchange."""
    exchanges: dict[tuple[int, str], list[Transfer]] = {}
    for transfer in sorted(transfers, key=lambda transfer: transfer.nbytes):
        if transfer.operation == "exchange":
            exchanges.setdefault((transfer.world_size, transfer.link), []).append(transfer)
    return [
        Connection(
            world_size=world_size,
            link=link,
            mb_per_s=sizes[-1].wire_bytes / min(sizes[-1].seconds) / 1e6,
            latency_us=min(sizes[0].seconds) * 1e6,
        )
        for (world_size, link), sizes in exchanges.items()
    ]


SIZES = [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
"""bytes of the whole vector"""
_REPETITIONS = 12

RowsByField = dict[str, list[dict[str, Any]]]
"""rows of a calibration, by its field"""


def calibrate(
    world_sizes: Sequence[int],
    codecs: Sequence[tuple[str, bool]],
    threads: int,
    timeout_s: float,
    repetitions: int = _REPETITIONS,
    placement: CpuAffinity = "auto",
    memory: Sequence[MemoryOperation] = (),
    nodes: int = 1,
) -> Calibration | None:
    """Measure transport for every number of ranks, and codecs and memory on the first.

    Args:
        world_sizes: one or more, each of several ranks; under torchrun or srun that of its ranks.
        codecs: text of each codec in a strategy, and whether error feedback wraps it; those that
            fail are left out.
        threads: of each rank.
        placement: of the ranks.
        memory: operations to measure.
        nodes: of the ranks.

    Returns:
        None in processes that torchrun or srun started for other ranks than the first.

    Raises:
        RunFailed: a rank failed.
    """
    meter = CpuMeter()  # the ranks are children of this process
    rows: RowsByField = {}
    for ranks in world_sizes:
        with temporary("shardlab-calibration") as folder:
            path = Path(folder, "rows.json")
            # all of these ranks in one launch: under srun there is no other
            costs = (codecs, memory) if ranks == world_sizes[0] else ((), ())
            measure = partial(_measure, path, connection_name(None, nodes), repetitions, *costs)
            launch(measure, ranks, threads, timeout_s, placement=placement)
            if not path.exists():  # rank 0 is of another process
                return None
            for field, some in dict(read_json(path)).items():
                rows.setdefault(field, []).extend(some)
        say(f"calibrate: {ranks} ranks, {connection_name(None, nodes)}")
    return Calibration.model_validate(
        {
            **rows,
            "contention": Contention.of([meter.read()]),
            "revision": git_revision(),
            "torch": torch.__version__,
            "host": describe_host(),
            "kernels": native.serving(),
        }
    )


def _measure(
    path: Path,
    link: str,
    repetitions: int,
    codecs: Sequence[tuple[str, bool]],
    memory: Sequence[MemoryOperation],
    group: dist.ProcessGroup,
) -> None:
    """Write the rows of rank 0."""
    codecs = working(codecs, group)
    specs = {codec: CODECS.get(split_text(codec[0])["name"]) for codec in codecs}
    phased = [codec for codec, spec in specs.items() if spec is not None and spec.multi_phase]
    single = [codec for codec in codecs if codec not in phased]
    rows = {
        "transfers": _transfers(link, repetitions, group),
        "codecs": codec_times(single, repetitions, group),
        "phased": phased_times(phased, repetitions, group),
        "memory": memory_times(memory, repetitions, group),
    }
    if dist.get_rank(group) == 0:
        write_json(path, rows)


def _transfers(link: str, repetitions: int, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Return the seconds of every repetition on the slowest rank, by operation and size."""
    world_size = dist.get_world_size(group)
    operations = {nbytes: _operations(group, nbytes) for nbytes in SIZES}
    calls = {
        f"{operation} {nbytes}": call
        for nbytes, ways in operations.items()
        for operation, call in ways.items()
    }
    ranks = gather_values(interleave(calls, repetitions, group), group)
    return [
        {
            "operation": operation,
            "world_size": world_size,
            "link": link,
            "nbytes": nbytes,
            "wire_bytes": wire_bytes(operation, nbytes, world_size),
            "seconds": [
                max(times)
                for times in zip(*(rank[f"{operation} {nbytes}"] for rank in ranks), strict=True)
            ],
        }
        for nbytes, ways in operations.items()
        for operation in ways
    ]


def _operations(group: dist.ProcessGroup, nbytes: int) -> Mapping[Operation, Callable[[], object]]:
    """Return operations on vectors of `nbytes` bytes, as engines use them."""
    transport, size = Transport(group), dist.get_world_size(group)
    # every operation has its own vectors: caches are no warmer than in a step
    sent, received = (torch.ones(nbytes // 4 // size * size) for _ in range(2))
    shard = torch.ones(sent.numel() // size)
    parts, slots = list(sent.chunk(size)), list(received.chunk(size))
    return {
        "exchange": lambda: transport.all_to_all(parts, slots),
        "gather": lambda: transport.all_to_all(*transport.gathering(shard, slots)),
        "all_reduce": lambda: dist.all_reduce(received, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, sent, group=group),
    }
