"""Rates of a GPU: its copies, products and updates beside it, and codecs compared with its copy.

    python -m benchmarks.gpu.rates [CODEC ...] [--threads T] [--out FOLDER]

Without codecs the ceilings of all other figures: a copy on the device, page-locked copies in both
directions and our update of parameters in host memory, which bound a step of `slide`, and the
product of matrices. With codecs the bytes that each touches per second, as a share of those of the
copy, of Gaussian noise, as in `benchmarks/codecs.py`.
"""

import os
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks import adam
from benchmarks.codecs import codec_calls, shares_of_copy
from benchmarks.common import arguments, best_times, clock_of, on_ranks
from benchmarks.gpu.figures import OUT, on_gpu, record
from shardlab.codecs.registry import make_codec
from shardlab.comm.object_collectives import device_of
from shardlab.kernels.workers import Workers

CEILINGS, CODECS = "Ceilings", "Codecs: GB/s of float32, and shares of a copy's rate"


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    args = arguments(__doc__, ("codecs", "default: ceilings"), threads=max(1, cores - 2), out=OUT)
    for spec in args.codecs:  # one after another: the others count if the time is over
        (row,) = on_ranks(1, partial(codec_row, spec, 1 << 26 if on_gpu() else 1 << 16))
        record(args.out, CODECS, spec, row)
    if args.codecs:
        return
    for rates in (copies, products, partial(updates, args.threads)):
        (row,) = on_ranks(1, rates)
        for name, rate in row.items():
            record(args.out, CEILINGS, name, {"rate": rate})


def copies(group: dist.ProcessGroup) -> dict[str, float]:
    """Return GB/s of copies: bytes read and written on the device, bytes moved to and from it."""
    device, n = device_of(group), 1 << 28 if on_gpu() else 1 << 20
    x, y = torch.randn(n, device=device), torch.empty(n, device=device)
    host = torch.empty(n, dtype=torch.bfloat16, pin_memory=on_gpu())
    there = torch.zeros(n, dtype=torch.bfloat16, device=device)
    calls: dict[str, Callable[[], object]] = {
        "copy on the device, GB/s": lambda: y.copy_(x),
        "copy to the device, GB/s": lambda: there.copy_(host, non_blocking=True),
        "copy to host memory, GB/s": lambda: host.copy_(there, non_blocking=True),
    }
    seconds = best_times(calls, 8, clock=clock_of(device))
    moved = dict.fromkeys(calls, 2 * n) | {"copy on the device, GB/s": 8 * n}
    return {name: moved[name] / seconds[name] / 1e9 for name in calls}


def products(group: dist.ProcessGroup) -> dict[str, float]:
    """Return TFLOP/s of a product of square matrices: random ones, since constants cost less."""
    device, n = device_of(group), 8192 if on_gpu() else 256
    rates = {}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = best_times({"mm": partial(torch.mm, a, b, out=out)}, 8, clock=clock_of(device))
        rates[f"product in {name}, TFLOP/s"] = 2 * n**3 / seconds["mm"] / 1e12
    return rates


def updates(threads: int, _: dist.ProcessGroup) -> dict[str, float]:
    """Return million parameters per second of our mixed update in host memory, and of torch's."""
    n = 1 << 26 if on_gpu() else 1 << 18
    workers = Workers(threads)
    calls = adam.calls(adam.Vectors(n), workers)
    ways = {name: calls[name] for name in ("mixed", "torch mixed")}
    seconds = best_times(ways, 3, threads)
    workers.close()
    return {f"update on the host, {name}, M/s": n / seconds[name] / 1e6 for name in ways}


def codec_row(spec: str, n: int, group: dist.ProcessGroup) -> dict[str, float]:
    """Return GB/s of the copy and of calls of a codec, and their shares of the copy's rate."""
    device, begin = device_of(group), perf_counter()
    touched, calls = codec_calls(make_codec(spec), torch.randn(n, device=device))
    seconds = best_times(calls, 5, clock=clock_of(device))
    row = {"copy": touched["memcpy"] / seconds["memcpy"] / 1e9}
    for name, share in shares_of_copy(touched, seconds).items():
        row |= {name: 4 * n / seconds[name] / 1e9, f"{name}, share": share}
    return {**row, "with compilation, s": perf_counter() - begin}


if __name__ == "__main__":
    main()
