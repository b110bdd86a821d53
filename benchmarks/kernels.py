"""How close each kernel comes to memcpy: bytes touched per second, as a share of `copy_`'s.

Touched is each byte that an ideal single pass reads or writes once: an encoding reads the vector
and writes the payload; with error feedback it reads and writes the residual as well; a sum of W
payloads reads them and writes the vector. Reused buffers, the best of several repetitions in which
memcpy takes its turn. A share of 1 means as fast as memory; more is possible, since reading is
cheaper than writing.

With one thread time is that of the processor, so other programs count only for what they take of
caches and memory. The second table tells how much faster two threads are than one, by the clock on
the wall: it needs a machine at rest.

    python -m benchmarks.kernels [--only NAME ...] [--vector FILE.safetensors] [--repetitions R]

`--vector` takes all float32 tensors of the file as one vector, repeated or cut to `--elements`;
without it the vector is Gaussian noise. SHARDLAB_KERNELS=reference measures the PyTorch reference.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.speed import as_received, best_times
from shardlab.kernels import float8, floats, integers, native, signs
from shardlab.kernels.grouped import GroupedKernel

KERNELS: dict[str, tuple[GroupedKernel, int]] = {
    **{name: (kernel, 128) for name, kernel in integers.KERNELS.items()},
    **{name: (kernel, floats.GROUP) for name, kernel in floats.KERNELS.items()},
    **{name: (kernel, 128) for name, kernel in float8.KERNELS.items()},
    "dynamic8": (float8.KERNELS["dynamic8"], 256),
    **{name: (kernel, 512) for name, kernel in signs.KERNELS.items()},
}
"""by format: the kernel and its group"""

RANKS = (2, 4, 8)
KEY = (0x12345678, 0x9ABCDEF0)
Call = Callable[[], object]


class Case:
    """The buffers of one kernel, and its calls."""

    def __init__(self, kernel: GroupedKernel, group: int, x: Tensor) -> None:
        n, wire = x.numel(), kernel.payload_bytes(x.numel(), group)
        self.bits = 8 * wire / n
        kept, out = torch.zeros_like(x), torch.zeros_like(x)
        payloads = as_received([kernel.encode(x, group, (rank, 0)) for rank in range(max(RANKS))])

        def summed(ranks: int) -> Call:
            return lambda: kernel.decode_sum(payloads[:ranks], group, out, 1 / ranks)

        self.calls: dict[str, tuple[int, Call]] = {
            "memcpy": (8 * n, lambda: out.copy_(x)),
            "encode": (4 * n + wire, lambda: kernel.encode(x, group, KEY, payloads[0])),
            "+ residual": (
                12 * n + wire,
                lambda: kernel.encode_residual(x, kept, kept, group, KEY, payloads[0]),
            ),
        } | {f"sum of {w}": (4 * n + w * wire, summed(w)) for w in RANKS}
        """by column: bytes touched, and the call"""

    def rates(self, threads: int, repetitions: int, clock: Callable[[], float]) -> dict[str, float]:
        """Return bytes per second of the fastest repetition of the interleaved calls."""
        calls = {name: call for name, (_, call) in self.calls.items()}
        best = best_times(calls, repetitions, threads, clock=clock)
        return {name: touched / best[name] for name, (touched, _) in self.calls.items()}


def vector(path: Path | None, n: int) -> Tensor:
    """float32 [n] from the tensors of a file, or noise."""
    if path is None:
        return torch.randn(n, generator=torch.Generator().manual_seed(0)) * 1e-3
    given = torch.cat([tensor.float().flatten() for tensor in load_file(path).values()])
    return given.repeat(-(-n // given.numel()))[:n].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--vector", type=Path)
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    x = vector(args.vector, args.elements)
    source = args.vector.name if args.vector else "Gaussian noise"
    print(f"compiled kernels: {native.available()}; {x.numel()} float32, {source}")
    one: dict[str, list[str]] = {}
    two: dict[str, list[str]] = {}
    for name in args.only:
        case = Case(*KERNELS[name], x)
        rates = case.rates(1, args.repetitions, time.thread_time)
        memcpy = rates.pop("memcpy")
        one[name] = [f"{case.bits:.3f}", f"{memcpy / 1e9:.1f}"]
        one[name] += [f"{rate / memcpy:.2f}" for rate in rates.values()]
        single, double = (case.rates(n, args.repetitions, time.perf_counter) for n in (1, 2))
        two[name] = [f"{double[column] / single[column]:.2f}" for column in single]
    columns = list(case.calls)
    _table("share of memcpy's bytes per second, one thread", one, ["bits", "GB/s", *columns[1:]])
    _table("two threads over one", two, columns)
    print(f"\ncost of a call on one element: {_overhead():.1f} us")


def _table(title: str, rows: dict[str, list[str]], columns: list[str]) -> None:
    print(f"\n{title}\n" + " " * 20 + "".join(f"{column:>12}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<20}" + "".join(f"{value:>12}" for value in row))


def _overhead() -> float:
    x = torch.zeros(1)
    kernel = integers.KERNELS["int8"]
    payload = kernel.encode(x, 8)
    start, calls = time.perf_counter(), 5000
    for _ in range(calls):
        kernel.encode(x, 8, payload=payload)
    return (time.perf_counter() - start) / calls * 1e6


if __name__ == "__main__":
    main()
