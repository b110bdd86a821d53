"""What single operations cost on this machine: transport, emulated links, codecs, memory.

The operations take turns, round by round in another order, and begin after a pause in which the
link comes to rest, so that its bucket is full. A collective counts by its slowest rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist

from shardlab.calibration.codec_costs import Times, codec_times, interleave
from shardlab.calibration.memory_costs import memory_times
from shardlab.core.files import read_json, write_json
from shardlab.core.progress import say
from shardlab.emulation.link import emulated
from shardlab.environment.host import describe_host, git_revision
from shardlab.experiment.affinity import CpuAffinity
from shardlab.experiment.link import LOOPBACK, Link, bucket_bytes
from shardlab.launch import launch
from shardlab.measurements.calibration import (
    Calibration,
    CodecCost,
    MemoryCost,
    MemoryOperation,
    Operation,
    Transfer,
    wire_bytes,
)
from shardlab.transport.object_collectives import gather_values
from shardlab.transport.transport import Transport

SIZES = [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
"""bytes of the whole vector"""
_ROUNDS = 12
_LONGEST_S = 0.1
"""larger vectors than a link carries in this time tell nothing new"""


class Place(NamedTuple):
    """Where operations are measured."""

    world_size: int
    link: Link | None


def calibrate(
    places: Sequence[Place],
    codecs: Iterable[tuple[str, bool]],
    threads: int,
    timeout_s: float,
    rounds: int = _ROUNDS,
    placement: CpuAffinity = "auto",
    memory: Sequence[MemoryOperation] = (),
) -> Calibration:
    """Measures every operation at every place, codecs and memory on all ranks of the first.

    Where this process cannot make links, nothing is measured on them: they are a formula then.

    Args:
        places: one or more, each of several ranks.
        codecs: what strategies call them, and whether with error feedback.
        threads: of each rank.
        placement: of the ranks.
        memory: what is measured of it.

    Raises:
        RunFailed: a rank failed.
    """
    on_ranks = partial(_on_ranks, threads, timeout_s, placement)
    transfers: list[Transfer] = []
    for place in places:
        times = on_ranks(place, partial(_transfer_times, place, rounds))
        if times is not None:
            transfers += _transfers(place, times)
            say(f"calibrate: {place.world_size} ranks, {_name(place.link)}")
    costs: list[CodecCost] = []
    one = places[0]._replace(link=None)
    for codec, feedback in codecs:
        measure = partial(codec_times, codec, feedback, rounds)
        found = on_ranks(one, measure)
        costs += [CodecCost(codec=codec, error_feedback=feedback, **each) for each in found]
    moved = on_ranks(one, partial(memory_times, memory, rounds)) if memory else []
    return Calibration(
        transfers=transfers,
        codecs=costs,
        memory=[MemoryCost(**each) for each in moved],
        revision=git_revision(),
        torch=torch.__version__,
        host=describe_host(),
    )


def _on_ranks(
    threads: int,
    timeout_s: float,
    placement: CpuAffinity,
    place: Place,
    measure: Callable[[dist.ProcessGroup], Any],
) -> Any:
    """What `measure` returns on the first rank; None where the link is one by formula."""
    with (
        TemporaryDirectory(prefix="shardlab-calibration-") as folder,
        emulated(place.link, place.world_size) as link,
    ):
        if link.kind == "in-process":
            return None
        path = Path(folder, "found.json")

        def worker(group: dist.ProcessGroup) -> None:
            found = measure(group)
            if dist.get_rank(group) == 0:
                write_json(path, found)

        ranks = place.world_size, threads, timeout_s
        launch(worker, *ranks, links=link.links, placement=placement)
        return read_json(path)


def _transfer_times(place: Place, rounds: int, group: dist.ProcessGroup) -> Times:
    """Seconds of every round by operation and size."""
    rate = None if place.link is None else place.link.bits_per_second
    pause = 0.0 if rate is None else 8 * bucket_bytes(rate) / rate
    calls = {
        f"{operation} {nbytes}": call
        for nbytes in SIZES
        for operation, call in _operations(group, nbytes).items()
        if rate is None or 8 * wire_bytes(operation, nbytes, place.world_size) / rate < _LONGEST_S
    }
    times = interleave(calls, rounds, group, pause)
    ranks = gather_values(times, group)
    return {
        name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in calls
    }


def _operations(group: dist.ProcessGroup, nbytes: int) -> Mapping[Operation, Callable[[], object]]:
    """On vectors of so many bytes, as engines use them."""
    transport, size = Transport(group), dist.get_world_size(group)
    # the vectors of a rank are not those of another operation: no cache is warmer than in a step
    given, taken = (torch.ones(nbytes // 4 // size * size) for _ in range(2))
    shard = torch.ones(given.numel() // size)
    parts, places = list(given.chunk(size)), list(taken.chunk(size))
    return {
        "exchange": lambda: transport.exchange(parts, places),
        "gather": lambda: transport.start_gather(shard, places).wait(),
        "all_reduce": lambda: dist.all_reduce(taken, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, given, group=group),
    }


def _transfers(place: Place, times: Times) -> list[Transfer]:
    link = place.link
    return [
        Transfer(
            operation=operation,
            world_size=place.world_size,
            link=_name(link),
            link_emulation="none" if link is None else "namespaces",
            bits_per_second=None if link is None else link.bits_per_second,
            nbytes=nbytes,
            wire_bytes=wire_bytes(operation, nbytes, place.world_size),
            seconds=times[f"{operation} {nbytes}"],
        )
        for operation in get_args(Operation)
        for nbytes in SIZES
        if f"{operation} {nbytes}" in times
    ]


def _name(link: Link | None) -> str:
    return LOOPBACK if link is None else link.name
