"""Speed of each grouped codec: bytes touched per second, as a share of those of memcpy (`copy_`).

Touched is each byte that an ideal single pass reads or writes once: an encoding reads the vector
and writes the payload; with error feedback it reads and writes the residual as well; a sum of W
payloads reads them and writes the vector. Buffers are reused, and memcpy is interleaved with the
repetitions, of which the fastest counts. A share of 1 means memory bandwidth; more is possible,
since reads are cheaper than writes.

With one thread CPU time is measured, which other programs affect only through caches and memory.
The second table has the speed-up of two threads in wall-clock time: it needs an idle machine.

    python -m benchmarks.kernels [--only NAME ...] [--vector FILE.safetensors] [--repetitions R]

`--vector` takes all float32 tensors of the file as one vector, repeated or cut to `--elements`;
without it the vector is Gaussian noise. SHARDLAB_KERNELS=reference measures the PyTorch reference.
"""

import time
from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.common import arguments, choose, print_table
from benchmarks.speed import as_received, best_times
from shardlab.codecs import native
from shardlab.codecs.base import Codec, MessageKey
from shardlab.codecs.registry import make_codec

CODECS = (
    *("bf16", "fp16", "natural", "fp8", "fp8:format=e5m2", "int8", "int8:rounding=stochastic"),
    *("int4", "int4:rounding=stochastic", "int4:levels=nf4", "sign"),
    *("dynamic8", "qsgd:levels=1", "qsgd:levels=7", "qsgd:levels=127", "efsign", "onebit"),
)
"""the last row has no compiled kernels"""
RANKS = (2, 4, 8)
KEY = MessageKey(seed=0, step=0, unit="benchmark", rank=0)
Call = Callable[[], object]


class Case:
    """Buffers and calls of one codec."""

    def __init__(self, codec: Codec, x: Tensor) -> None:
        n, wire = x.numel(), codec.payload_bytes(x.numel())
        self.bits = 8 * wire / n
        kept, out = torch.zeros_like(x), torch.zeros_like(x)
        keys = [KEY._replace(rank=rank) for rank in range(max(RANKS))]
        payloads = as_received([codec.encode(x, key) for key in keys])

        def summed(ranks: int) -> Call:
            return lambda: codec.decode_sum(payloads[:ranks], out, 1 / ranks, keys[:ranks])

        self.calls: dict[str, tuple[int, Call]] = {
            "memcpy": (8 * n, lambda: out.copy_(x)),
            "encode": (4 * n + wire, lambda: codec.encode(x, KEY, payloads[0])),
            "+ residual": (
                12 * n + wire,
                lambda: codec.encode_residual(x, kept, kept, KEY, payloads[0]),
            ),
        } | {f"sum of {w}": (4 * n + w * wire, summed(w)) for w in RANKS}
        """by column: bytes touched, and the call"""

    def rates(self, threads: int, repetitions: int, clock: Callable[[], float]) -> dict[str, float]:
        """Return bytes per second of the fastest repetition of the interleaved calls."""
        calls = {name: call for name, (_, call) in self.calls.items()}
        best = best_times(calls, repetitions, threads, clock=clock)
        return {name: touched / best[name] for name, (touched, _) in self.calls.items()}


def vector(path: str, n: int) -> Tensor:
    """Return float32 [n] from the tensors of a file, or noise."""
    if not path:
        return torch.randn(n, generator=torch.Generator().manual_seed(0)) * 1e-3
    given = torch.cat([tensor.float().flatten() for tensor in load_file(path).values()])
    return given.repeat(-(-n // given.numel()))[:n].contiguous()


def main() -> None:
    args = arguments(
        __doc__,
        only=([], "codecs; default: all"),
        vector=("", "safetensors file; default: Gaussian noise"),
        elements=1 << 24,
        repetitions=15,
    )
    x = vector(args.vector, args.elements)
    source = args.vector or "Gaussian noise"
    print(f"compiled kernels: {native.available()}; {x.numel()} float32, {source}")
    one: dict[str, list[str]] = {}
    two: dict[str, list[str]] = {}
    for name in choose(args.only, CODECS, CODECS):
        case = Case(make_codec(name), x)
        rates = case.rates(1, args.repetitions, time.thread_time)
        memcpy = rates.pop("memcpy")
        one[name] = [f"{case.bits:.3f}", f"{memcpy / 1e9:.1f}"]
        one[name] += [f"{rate / memcpy:.2f}" for rate in rates.values()]
        single, double = (case.rates(n, args.repetitions, time.perf_counter) for n in (1, 2))
        two[name] = [f"{double[column] / single[column]:.2f}" for column in single]
    columns = list(case.calls)
    for title, rows, names in (
        ("share of memcpy's bytes per second, one thread", one, ["bits", "GB/s", *columns[1:]]),
        ("two threads over one", two, columns),
    ):
        print_table(title, ["codec", *names], [[name, *row] for name, row in rows.items()])
    print(f"\ncost of a call on one element: {_overhead():.1f} us")


def _overhead() -> float:
    x = torch.zeros(1)
    codec = make_codec("int8:group=8")
    payload = codec.encode(x)
    start, calls = time.perf_counter(), 5000
    for _ in range(calls):
        codec.encode(x, out=payload)
    return (time.perf_counter() - start) / calls * 1e6


if __name__ == "__main__":
    main()
