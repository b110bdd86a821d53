"""Ways to move bytes between gloo ranks on this machine, and what an envelope costs.

    python -m benchmarks.transport [--world-size W] [--rounds R]

One run, calls take turns, best of several rounds, from barrier to barrier. `pieces` is what
`shardlab.comm.transport` does; the others send the same bytes to every other rank in another way,
and gloo's reduce-scatter and all-gather do the same job. Loopback shows the cost on the CPU; that
one message uses half of a full-duplex link shows only on a link.
"""

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from shardlab.comm import transport
from shardlab.comm.buffers import Buffers
from shardlab.comm.envelope import HEADER, Contents, describe, message_bytes, seal, unseal
from shardlab.comm.transport import Transport
from shardlab.train.launch import launch

SIZES = [1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24]


def ways(group: dist.ProcessGroup, size: int) -> dict[str, Callable[[], object]]:
    """Calls that send `size` bytes from every rank to every other."""
    world_size, ours = dist.get_world_size(group), Transport(group)
    given = torch.ones(world_size * size // 4)
    taken = torch.empty_like(given)
    shard = torch.ones(size // 4)
    parts, places = list(given.chunk(world_size)), list(taken.chunk(world_size))

    def two_in_flight() -> None:
        with patch.object(transport, "IN_FLIGHT", 2):
            ours.exchange(parts, places)

    return {
        "pieces": lambda: ours.exchange(parts, places),
        "two in flight": two_in_flight,
        "all_to_all": lambda: dist.all_to_all_single(taken, given, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, given, group=group),
        "gather in pieces": lambda: ours.start_gather(shard, places).wait(),
        "all_gather": lambda: dist.all_gather_single(taken, shard, group=group),
    }


def best_times(
    calls: dict[str, Callable[[], object]], rounds: int, barrier: Callable[[], object]
) -> dict[str, float]:
    """Seconds of the fastest round of each call."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 1):
        for name, call in calls.items():
            barrier()
            start = time.perf_counter()
            call()
            barrier()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def show_ways(group: dist.ProcessGroup, rounds: int) -> None:
    """Milliseconds, and how many times as long as `pieces` each way takes."""
    for size in SIZES:
        calls = ways(group, size)
        best = best_times(calls, rounds, lambda: dist.barrier(group))
        if dist.get_rank(group) == 0:
            if size == SIZES[0]:
                print(f"{'bytes to each':>14}" + "".join(f"{name:>20}" for name in calls))
            cells = (f"{t * 1e3:11.2f} ({t / best['pieces']:5.2f})" for t in best.values())
            print(f"{size:>14}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def envelope_costs(spec: str, n: int, rounds: int) -> dict[str, float]:
    """Seconds for n elements; every sealing comes after an encoding, as in an exchange."""
    codec, key = make_codec(spec), MessageKey(0, 0, "unit", 0)
    vector, residual = torch.randn(n) * 1e-3, torch.zeros(n)
    size = codec.payload_bytes(n)
    (message,) = Buffers().messages("sent", [message_bytes(size)], vector.device)
    room, contents = message[HEADER : HEADER + size], Contents(describe(codec), n, "unit", 0)
    calls = {
        "encode": lambda: codec.encode(vector, key, room),
        "seal": lambda: seal(message, size, contents),
        "encode_residual": lambda: codec.encode_residual(vector, residual, residual, key, room),
        "seal after it": lambda: seal(message, size, contents),
        "unseal": lambda: unseal(message, size, contents, 0),
    }
    return best_times(calls, rounds, lambda: None)


def show_envelopes(rounds: int) -> None:
    """Sealing as a share of encoding, without and with a residual."""
    print(f"\n{'codec':<8}{'elements':>10}{'encode ms':>11}{'seal':>8}{'with residual':>15}")
    for spec in ("int8", "bf16"):
        for n in (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24):
            t = envelope_costs(spec, n, rounds)
            shares = t["seal"] / t["encode"], t["seal after it"] / t["encode_residual"]
            print(f"{spec:<8}{n:>10}{t['encode'] * 1e3:>11.3f}{shares[0]:>8.2f}{shares[1]:>15.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(f"{args.world_size} ranks, ms (times as long as in pieces)")
    launch(lambda group: show_ways(group, args.rounds), args.world_size, 1, 120)
    torch.set_num_threads(1)
    show_envelopes(args.rounds)


if __name__ == "__main__":
    main()
