"""Costs of single operations on this machine, and its hardware."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardlab.codecs import native
from shardlab.comm.emulated_link import emulated
from shardlab.comm.object_collectives import gather_values
from shardlab.comm.transport import Transport
from shardlab.config.calibration_record import (
    Calibration,
    MemoryOperation,
    Operation,
    Transfer,
    wire_bytes,
)
from shardlab.config.codec_table import CODECS, split_text
from shardlab.config.contention import Contention
from shardlab.config.machine import (
    Connection,
    CpuAffinity,
    Gpu,
    Hardware,
    Link,
    bucket_bytes,
    connection_name,
)
from shardlab.core.files import read_json, temporary, write_json
from shardlab.core.host import CpuMeter, describe_host, git_revision
from shardlab.core.progress import say
from shardlab.engines.cpu_placement import SYSFS, read_topology
from shardlab.forecast.codec_costs import codec_times, interleave, memory_times, phased_times
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
_LONGEST_S = 0.1
"""vectors that take a link longer are left out: they do not improve the fit"""


Rows = dict[str, list[dict[str, Any]]]
"""rows of a calibration, by its field"""


class Network(NamedTuple):
    """Ranks and their link; None: loopback, or what connects the nodes."""

    world_size: int
    link: Link | None
    nodes: int = 1

    @property
    def name(self) -> str:
        """Name of the connection in records."""
        return connection_name(self.link, self.nodes)


def calibrate(
    networks: Sequence[Network],
    codecs: Sequence[tuple[str, bool]],
    threads: int,
    timeout_s: float,
    repetitions: int = _REPETITIONS,
    placement: CpuAffinity = "auto",
    memory: Sequence[MemoryOperation] = (),
) -> Calibration | None:
    """Measure transport on every network, and codecs and memory on the ranks of the first.

    A link that this process cannot create is not measured: a formula emulates it.

    Args:
        networks: one or more, each of several ranks, the first without an emulated link; under
            torchrun or srun the one of its ranks.
        codecs: text of each codec in a strategy, and whether error feedback wraps it.
        threads: of each rank.
        placement: of the ranks.
        memory: operations to measure.

    Returns:
        None in processes that torchrun or srun started for other ranks than the first.

    Raises:
        RunFailed: a rank failed.
    """
    meter = CpuMeter()  # the ranks are children of this process
    rows: Rows = {}
    for network in networks:
        # all of one network in one launch: under srun there is no other
        costs = (codecs, memory) if network == networks[0] else ((), ())
        measure = partial(_measure, network, repetitions, *costs)
        measured = _on_ranks(threads, timeout_s, placement, network, measure)
        for field, some in measured.items():
            rows.setdefault(field, []).extend(some)
        if measured:
            say(f"calibrate: {network.world_size} ranks, {network.name}")
    if not rows:
        return None
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


def _on_ranks(
    threads: int,
    timeout_s: float,
    placement: CpuAffinity,
    network: Network,
    measure: Callable[[dist.ProcessGroup], Rows],
) -> Rows:
    """Return the rows of rank 0; none where a formula emulates the link, or where rank 0 is of
    another process."""
    with (
        temporary("shardlab-calibration") as folder,
        emulated(network.link, network.world_size) as link,
    ):
        if link.kind == "in-process":
            return {}
        path = Path(folder, "rows.json")

        def worker(group: dist.ProcessGroup) -> None:
            rows = measure(group)
            if dist.get_rank(group) == 0:
                write_json(path, rows)

        ranks = network.world_size
        launch(worker, ranks, threads, timeout_s, links=link.links, placement=placement)
        return dict(read_json(path)) if path.exists() else {}


def _measure(
    network: Network,
    repetitions: int,
    codecs: Sequence[tuple[str, bool]],
    memory: Sequence[MemoryOperation],
    group: dist.ProcessGroup,
) -> Rows:
    multi_phase = [codec for codec in codecs if _multi_phase(codec[0])]
    single = [codec for codec in codecs if codec not in multi_phase]
    return {
        "transfers": _transfers(network, repetitions, group),
        "codecs": codec_times(single, repetitions, group),
        "phased": phased_times(multi_phase, repetitions, group),
        "memory": memory_times(memory, repetitions, group),
    }


def _multi_phase(codec: str) -> bool:
    spec = CODECS.get(split_text(codec)["name"])
    return spec is not None and spec.multi_phase


def _transfers(
    network: Network, repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return the seconds of every repetition on the slowest rank, by operation and size."""
    world_size, link = network.world_size, network.link
    rate = None if link is None else link.bits_per_second
    pause = 0.0 if rate is None else 8 * bucket_bytes(rate) / rate
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], object]] = {}
    for nbytes in SIZES:
        for operation, call in _operations(group, nbytes).items():
            sent = wire_bytes(operation, nbytes, world_size)
            if rate is not None and 8 * sent / rate >= _LONGEST_S:
                continue
            calls[f"{operation} {nbytes}"] = call
            rows[f"{operation} {nbytes}"] = {
                "operation": operation,
                "world_size": world_size,
                "link": network.name,
                "link_emulation": "none" if link is None else "namespaces",
                "bits_per_second": rate,
                "nbytes": nbytes,
                "wire_bytes": sent,
            }
    ranks = gather_values(interleave(calls, repetitions, group, pause), group)
    for key, row in rows.items():
        repeated = zip(*(rank[key] for rank in ranks), strict=True)
        row["seconds"] = [max(times) for times in repeated]
    return [*rows.values()]


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
