"""Ways to send bytes between gloo ranks on this machine.

    python -m benchmarks.transport [--world-size W] [--repetitions R] [--rate 100mbit 1gbit ...]
                                   [--out FOLDER]

One run in which the calls take turns, from barrier to barrier. `all_to_all, pieces` is what
`shardlab.comm.transport` does; the others send the same bytes to every other rank in another way,
and gloo's reduce-scatter and all-gather do the same job. Loopback shows the cost on the CPU. With
rates the table is repeated on emulated links, with the share of the link's rate that those bytes
reach, at best and in the median: whether one large message uses both directions at once is chance.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.common import arguments, interleaved_times, on_ranks, publish, text_table
from shardlab.comm.transport import Transport
from shardlab.core.link import bits_per_second
from shardlab.core.numbers import figure
from shardlab.core.progress import say
from shardlab.report.tables import Table

SIZES = [1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
_SECONDS = 60
"""about as long a table takes on a slow link"""


def ways(group: dist.ProcessGroup, size: int) -> dict[str, Callable[[], object]]:
    """Return calls that send `size` bytes from every rank to every other."""
    world_size, transport = dist.get_world_size(group), Transport(group)
    inputs, shard = torch.ones(world_size * size // 4), torch.ones(size // 4)
    outputs = torch.empty_like(inputs)
    parts, received = list(inputs.chunk(world_size)), list(outputs.chunk(world_size))
    return {
        "all_to_all, pieces": lambda: transport.all_to_all(parts, received),
        "all_to_all, gloo": lambda: dist.all_to_all_single(outputs, inputs, group=group),
        "reduce_scatter, gloo": lambda: dist.reduce_scatter_single(shard, inputs, group=group),
        "gather, pieces": lambda: transport.all_to_all(*transport.gathering(shard, received)),
        "all_gather, gloo": lambda: dist.all_gather_single(outputs, shard, group=group),
    }


def measure(sizes: list[int], repetitions: int, group: dist.ProcessGroup) -> dict[str, list[float]]:
    """Return seconds of all repetitions by `SIZE WAY`."""

    def clock() -> float:
        dist.barrier(group)
        return time.perf_counter()

    calls = {f"{size} {name}": call for size in sizes for name, call in ways(group, size).items()}
    return interleaved_times(calls, repetitions, clock=clock)


def table(rate: str | None, world_size: int, sizes: list[int], repetitions: int) -> Table:
    """Measure the ways on one kind of link; without a rate, on the loopback interface."""
    bits = None if rate is None else bits_per_second(rate)
    if bits is not None:
        # a turn keeps the link busy for about twice as long as its bytes take
        turn_s = 2 * 5 * sum(sizes) * 8 * (world_size - 1) / bits
        repetitions = min(repetitions, max(2, round(_SECONDS / turn_s) - 1))
    seconds = on_ranks(world_size, partial(measure, sizes, repetitions), rate=rate)[0]
    say(f"benchmarks: {rate or 'loopback'}: {repetitions} repetitions")
    cells: dict[str, list[str]] = {}
    for name, values in seconds.items():
        size, _, way = name.partition(" ")
        text = figure(1e3 * min(values))
        if bits is not None:
            line_s = (world_size - 1) * int(size) * 8 / bits
            text += f" ({line_s / min(values):.2f}, {line_s / statistics.median(values):.2f})"
        cells.setdefault(way, []).append(text)
    shares = "" if rate is None else f" (share of the rate: best, median of {repetitions})"
    title = f"{world_size} ranks, {rate or 'loopback'}: ms{shares}"
    rows = [[way, *row] for way, row in cells.items()]
    return text_table(title, ["bytes to each", *map(str, sizes)], rows)


def main() -> None:
    args = arguments(
        __doc__,
        world_size=2,
        repetitions=15,
        rate=([], "such as 100mbit 1gbit"),
        sizes=(SIZES, "bytes to each other rank"),
    )
    tables = [
        table(rate, args.world_size, args.sizes, args.repetitions) for rate in (None, *args.rate)
    ]
    publish(__doc__, args.out / "transport.md", *tables)


if __name__ == "__main__":
    main()
