"""How close each kernel comes to memcpy: bytes touched per second, as a share of `copy_`'s.

One thread, reused buffers, everything in one run, best of several rounds that take turns. A share
of 1 means that the kernel is as fast as memory; more is possible, since reading is cheaper than
writing. `python -m benchmarks.kernels [--elements N] [--group G] [--rounds R]`; with
SHARDLAB_KERNELS=reference it measures the PyTorch reference.
"""

import argparse
import time
from collections.abc import Callable

import torch

from shardlab.kernels import bf16, int8, native


def kernels(n: int, group: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Per kernel: bytes that a call reads and writes, and the call."""
    x, out = torch.randn(n) * 1e-3, torch.zeros(n)
    kept = torch.zeros(n)
    small = int8.encode(x, group)
    half = bf16.encode(x)
    wire = small.numel()
    return {
        "memcpy": (8 * n, lambda: out.copy_(x)),
        "int8 encode": (4 * n + wire, lambda: int8.encode(x, group, small)),
        "int8 encode_residual": (
            12 * n + wire,
            lambda: int8.encode_residual(x, kept, group, small),
        ),
        "int8 decode_add": (8 * n + wire, lambda: int8.decode_add(small, group, out, 0.5)),
        "bf16 encode": (6 * n, lambda: bf16.encode(x, half)),
        "bf16 encode_residual": (14 * n, lambda: bf16.encode_residual(x, kept, half)),
        "bf16 decode_add": (10 * n, lambda: bf16.decode_add(half, out, 0.5)),
    }


def best_times(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of the fastest round; the calls take turns, so that all see the same machine."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"compiled kernels: {native.available()}; {args.elements} float32, group {args.group}")
    table = kernels(args.elements, args.group)
    best = best_times({name: call for name, (_, call) in table.items()}, args.rounds)
    memcpy = table["memcpy"][0] / best["memcpy"]
    print(f"{'kernel':<22}{'ms':>9}{'GB/s':>8}{'of memcpy':>11}{'GB/s of float32':>17}")
    for name, (touched, _) in table.items():
        rate = touched / best[name]
        floats = 4 * args.elements / best[name] / 1e9
        print(
            f"{name:<22}{best[name] * 1e3:>9.3f}{rate / 1e9:>8.2f}{rate / memcpy:>11.2f}"
            f"{floats:>17.2f}"
        )
    print(f"cost of a call on one element: {_overhead():.1f} us")


def _overhead() -> float:
    x = torch.zeros(1)
    payload = int8.encode(x, 8)
    start, calls = time.perf_counter(), 5000
    for _ in range(calls):
        int8.encode(x, 8, payload)
    return (time.perf_counter() - start) / calls * 1e6


if __name__ == "__main__":
    main()
