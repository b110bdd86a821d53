"""Costs of single operations on this machine, and its hardware."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist

from shardlab.codecs import native
from shardlab.comm.emulated_link import emulated
from shardlab.comm.object_collectives import gather_values
from shardlab.comm.transport import Transport
from shardlab.config.calibration_record import (
    Calibration,
    CodecCost,
    MemoryCost,
    MemoryOperation,
    Operation,
    PhasedCost,
    Transfer,
    wire_bytes,
)
from shardlab.config.codec_table import find, split_text
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
from shardlab.forecast.codec_costs import Times, codec_times, interleave, memory_times, phased_times
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


SIZES = [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
"""bytes of the whole vector"""
_REPETITIONS = 12
_LONGEST_S = 0.1
"""vectors that take a link longer are left out: they do not improve the fit"""


Measurement = Callable[[dist.ProcessGroup], Any]
"""measures on all ranks, and returns what is found on the first"""


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
        networks: one or more, each of several ranks; under torchrun or srun the one of its ranks.
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
    one = networks[0]._replace(link=None)
    phased = [each for each in codecs if _multi_phase(each[0])]
    single = [each for each in codecs if each not in phased]
    of_network: dict[Network, list[Measurement]] = {
        each: [partial(_transfer_times, each, repetitions)] for each in networks
    }
    # all of one network in one launch: under srun there is no other
    of_network.setdefault(one, [])
    of_network[one] += [
        partial(codec_times, single, repetitions),
        partial(phased_times, phased, repetitions),
        partial(memory_times, memory, repetitions),
    ]
    transfers: list[Transfer] = []
    coded: list[Any] = []
    summed: list[Any] = []
    moved: list[Any] = []
    for network, measurements in of_network.items():
        found = _on_ranks(threads, timeout_s, placement, network, measurements)
        if found is None:
            continue
        if network == one:
            *found, coded, summed, moved = found
        for times in found:
            transfers += _transfers(network, times)
            say(f"calibrate: {network.world_size} ranks, {network.name}")
    if not coded + summed + moved + transfers:
        return None
    return Calibration(
        transfers=transfers,
        codecs=[CodecCost(**each) for each in coded],
        phased=[PhasedCost(**each) for each in summed],
        memory=[MemoryCost(**each) for each in moved],
        contention=Contention.of([meter.read()]),
        revision=git_revision(),
        torch=torch.__version__,
        host=describe_host(),
        kernels=native.serving(),
    )


def _multi_phase(codec: str) -> bool:
    spec = find(split_text(codec)["name"])
    return spec is not None and spec.multi_phase


def _on_ranks(
    threads: int,
    timeout_s: float,
    placement: CpuAffinity,
    network: Network,
    measurements: Sequence[Measurement],
) -> list[Any] | None:
    """Return what the measurements return on rank 0; None where a formula emulates the link, or
    where rank 0 is of another process."""
    with (
        temporary("shardlab-calibration") as folder,
        emulated(network.link, network.world_size) as link,
    ):
        if link.kind == "in-process":
            return None
        path = Path(folder, "found.json")

        def worker(group: dist.ProcessGroup) -> None:
            found = [measure(group) for measure in measurements]
            if dist.get_rank(group) == 0:
                write_json(path, found)

        launch(
            worker,
            network.world_size,
            threads,
            timeout_s,
            links=link.links,
            placement=placement,
        )
        return read_json(path) if path.exists() else None


def _transfer_times(network: Network, repetitions: int, group: dist.ProcessGroup) -> Times:
    """Return the seconds of every repetition, by operation and size."""
    rate = None if network.link is None else network.link.bits_per_second
    pause = 0.0 if rate is None else 8 * bucket_bytes(rate) / rate
    calls = {
        f"{operation} {nbytes}": call
        for nbytes in SIZES
        for operation, call in _operations(group, nbytes).items()
        if rate is None or 8 * wire_bytes(operation, nbytes, network.world_size) / rate < _LONGEST_S
    }
    times = interleave(calls, repetitions, group, pause)
    ranks = gather_values(times, group)
    return {
        name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in calls
    }


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


def _transfers(network: Network, times: Times) -> list[Transfer]:
    link = network.link
    return [
        Transfer(
            operation=operation,
            world_size=network.world_size,
            link=network.name,
            link_emulation="none" if link is None else "namespaces",
            bits_per_second=None if link is None else link.bits_per_second,
            nbytes=nbytes,
            wire_bytes=wire_bytes(operation, nbytes, network.world_size),
            seconds=times[f"{operation} {nbytes}"],
        )
        for operation in get_args(Operation)
        for nbytes in SIZES
        if f"{operation} {nbytes}" in times
    ]
