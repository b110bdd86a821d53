"""Ways to send bytes between gloo ranks on this machine.

    python -m benchmarks.transport [--world-size W] [--repetitions R] [--rate 100mbit 1gbit ...]

One run, interleaved calls, from barrier to barrier: milliseconds of the best repetition.
`pieces` is what `shardlab.comm.transport` does, also with other sizes and numbers in flight;
the others send the same bytes to every other rank in another way, and gloo's reduce-scatter and
all-gather do the same job. Loopback shows the cost on the CPU. With rates the table is repeated on
emulated links, with the fraction of the link's rate that those bytes reach, at best and in the
median: whether one large message uses both directions at once is chance.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.common import arguments
from shardlab.comm import transport
from shardlab.comm.emulated_link import Links
from shardlab.comm.transport import Transport
from shardlab.config.machine import Link
from shardlab.train.launch import launch

SIZES = [1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
OTHER_PIECES = [(256, 2), (256, 4), (256, 8), (512, 4), (1024, 4)]
"""KiB, and how many are in flight"""
_SECONDS = 60
"""about as long a table takes on a slow link"""


def ways(group: dist.ProcessGroup, size: int) -> dict[str, Callable[[], object]]:
    """Return calls that send `size` bytes from every rank to every other."""
    world_size, ours = dist.get_world_size(group), Transport(group)
    given = torch.ones(world_size * size // 4)
    taken = torch.empty_like(given)
    shard = torch.ones(size // 4)
    parts, places = list(given.chunk(world_size)), list(taken.chunk(world_size))

    def in_pieces(piece: int, in_flight: int) -> Callable[[], None]:
        def call() -> None:
            with patch.multiple(transport, PIECE=piece, SMALL=piece, AT_ONCE=in_flight):
                ours.all_to_all(parts, places)

        return call

    return {
        "pieces": lambda: ours.all_to_all(parts, places),
        **{f"{kib} KiB x {n}": in_pieces(kib << 10, n) for kib, n in OTHER_PIECES},
        "all_to_all": lambda: dist.all_to_all_single(taken, given, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, given, group=group),
        "gather in pieces": lambda: ours.all_to_all(*ours.gathering(shard, places)),
        "all_gather": lambda: dist.all_gather_single(taken, shard, group=group),
    }


def interleaved(
    calls: Mapping[str, Callable[[], object]], repetitions: int, barrier: Callable[[], object]
) -> dict[str, list[float]]:
    """Return seconds of each call in every repetition but the first."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions + 1):
        for name, call in calls.items():
            barrier()
            start = time.perf_counter()
            call()
            barrier()
            taken[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in taken.items()}


def show_ways(group: dist.ProcessGroup, repetitions: int, bits_per_second: int | None) -> None:
    """Return milliseconds, and the fraction of the rate, or the ratio to `pieces`."""
    peers = dist.get_world_size(group) - 1
    for size in SIZES:
        calls = ways(group, size)
        taken = interleaved(calls, repetitions, lambda: dist.barrier(group))
        if dist.get_rank(group) == 0:
            if size == SIZES[0]:
                print(f"{'bytes to each':>14}" + "".join(f"{name:>20}" for name in calls))
            row = ""
            for seconds in taken.values():
                best, middle = min(seconds), statistics.median(seconds)
                if bits_per_second is None:
                    note = f"{best / min(taken['pieces']):5.2f}"
                else:
                    line = peers * size * 8 / bits_per_second
                    note = f"{line / best:4.2f} {line / middle:4.2f}"
                cell = f"{best * 1e3:.2f} ({note})"
                row += f"{cell:>20}"
            print(f"{size:>14}{row}", flush=True)


def show_link(rate: str | None, world_size: int, repetitions: int) -> None:
    """Print the table of one kind of link; without a rate, of the loopback interface."""
    with ExitStack() as stack:
        links = None if rate is None else stack.enter_context(Links(world_size, Link(rate=rate)))
        bits = None if links is None else links.link.bits_per_second
        if bits is None:
            print(f"{world_size} ranks, loopback: ms (times as long as in pieces)")
        else:
            # a repetition keeps the link busy for about twice as long as its bytes take
            a_repetition = 2 * (len(OTHER_PIECES) + 5) * sum(SIZES) * 8 * (world_size - 1) / bits
            repetitions = min(repetitions, max(2, round(_SECONDS / a_repetition) - 1))
            shares = f"share of the rate: best, median of {repetitions}"
            print(f"\n{world_size} ranks, {rate}: ms ({shares})")
        launch(lambda group: show_ways(group, repetitions, bits), world_size, 1, 120, links=links)


def main() -> None:
    args = arguments(__doc__, world_size=2, repetitions=15, rate=([], "such as 100mbit 1gbit"))
    for rate in (None, *args.rate):
        show_link(rate, args.world_size, args.repetitions)


if __name__ == "__main__":
    main()
