"""Codecs: bytes, errors on real gradients, and speed as a share of memcpy's.

    python -m benchmarks.codecs [SPEC ...] [--codecs MODULE ...] [--repetitions R] [--data FOLDER]
                                [--work FOLDER] [--out FOLDER]

Without SPEC all of `SPECS`, and an example of each other registered codec. Ranks reduce and scatter
the gradients of `benchmarks/gradients.py`, laid out as `fully_shard` does, without error feedback.
An error is |mean received - exact mean| / |exact mean|; bits are sent to others, by element.

Speed is bytes touched per second as a share of those of memcpy (`copy_`). Touched is each byte that
an ideal single pass reads or writes once: an encoding reads the vector and writes the payload; with
error feedback it reads and writes the residual as well; a sum of W payloads reads them and writes
the vector. Buffers are reused, all calls take turns, and the fastest repetition counts. A share of
1 means memory bandwidth; more is possible, since reads are cheaper than writes. Methods of several
phases have no payload to decode, and no row.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import DATA, WORK, arguments, best_times, on_ranks, publish, text_table
from benchmarks.gradients import UNIT, RecordedGradients, load_gradients
from shardlab.codecs.base import Codec, MessageKey, Unit
from shardlab.codecs.registry import make_method
from shardlab.codecs.wire import Buffers
from shardlab.comm.codec_collective import Route
from shardlab.comm.ledger import Ledger
from shardlab.comm.routes import make_collective
from shardlab.core.numbers import figure
from shardlab.core.progress import say, stopwatch
from shardlab.strategy.codec_table import CODECS, load_codecs, parse_codec

SPECS = (
    *("none", "bf16", "bf16:rounding=stochastic", "fp16", "natural"),
    *("fp8", "fp8:group=512", "fp8:format=e5m2"),
    *("int8:group=128", "int8:group=128,rounding=stochastic", "int8-shared:group=128"),
    *("int4:group=128", "int4:group=32", "int4:group=128,rounding=stochastic"),
    *("int4:group=128,levels=nf4", "dynamic8:group=256", "qsgd:levels=127", "qsgd:levels=7"),
    *("sign", "efsign:group=512", "onebit:group=512"),
    *("topk:density=0.01", "topk:density=0.01,values=int4", "topk:density=0.1"),
    # about 1 % of the elements of these gradients
    *("threshold:threshold=2.0e-3,cap=0.05", "randomk:density=0.01"),
    *("powersgd:rank=4", "powersgd:rank=16", "sketch:rows=5,width=0.02,density=0.01"),
    "gradiveq:slice=256,components=32,refresh=24",
)
WORLD_SIZES = 2, 4, 8
PAYLOADS = 2, 4, 8
COLUMNS = "encode", "encode + residual", *(f"sum of {count}" for count in PAYLOADS)
KEY = MessageKey(seed=0, step=0, unit="gradient", rank=0)
_NO_MAGNITUDE = ("sign",)
"""their sum is scaled to the exact mean magnitude"""


def main() -> None:
    args = arguments(
        __doc__,
        ("specs", "default: all"),
        codecs=([], "modules that register codecs"),
        repetitions=(8, "of timing"),
        data=DATA,
        work=WORK,
    )
    load_codecs(args.codecs, "--codecs")
    listed = {spec.partition(":")[0] for spec in SPECS}
    others = {name: spec.examples for name, spec in CODECS.items() if name not in listed}
    specs = args.specs or [*SPECS, *(next(iter(some), name) for name, some in others.items())]
    methods = [make_method(spec) for spec in specs]
    gradients = load_gradients(args.data, args.work)
    errors, speeds = [], []
    for spec, method in zip(specs, methods, strict=True):
        seconds = stopwatch()
        errors.append([spec, *error_cells(spec, gradients)])
        if isinstance(method, Codec):
            work = partial(speed_cells, method, gradients.large, args.repetitions)
            speeds.append([spec, *on_ranks(1, work)[0]])
        say(f"benchmarks: {spec} in {seconds():.0f} s")
    sizes = ["bits/element", *(f"error, W={world_size}" for world_size in WORLD_SIZES)]
    both = [f"{name}, 2 threads" for name in COLUMNS]
    publish(
        __doc__,
        args.out / "codecs.md",
        text_table("Bytes and errors", ["codec", *sizes, "extra collectives"], errors),
        text_table("Speed", ["codec", "encode, GB/s", *COLUMNS, *both], speeds),
        "One thread: share of memcpy's bytes per second. Two threads: times as fast as one.",
    )


def error_cells(spec: str, gradients: RecordedGradients) -> list[str]:
    """Return bits per element, the error at each of `WORLD_SIZES`, and extra collectives."""
    results = [on_ranks(size, partial(reduction, spec, gradients))[0] for size in WORLD_SIZES]
    errors = [_number(result["error"]) for result in results]
    return [f"{results[0]['bits']:.3f}", *errors, f"{results[0]['extra']:.0f}"]


def reduction(
    spec: str, gradients: RecordedGradients, group: dist.ProcessGroup
) -> dict[str, float]:
    """Reduce and scatter a mean over ranks; return its error, bits per element and collectives.

    Another one comes before it, of other batches: methods with a state have one then.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ledger = Ledger()
    collective = make_collective(group, ledger, "gradients", Route(make_method(spec)))
    for vectors in (gradients.before, gradients.ranks):
        ledger.reset()
        vector = scattered(vectors[rank], UNIT, size)
        shard = torch.empty(vector.numel() // size)
        collective.reduce_scatter(shard, vector.clone(), 1 / size, UNIT)
    account = ledger.accounts["gradients"]
    exact = scattered(gradients.ranks[:size].double().mean(0), UNIT, size)
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(shards, shard, group=group)
    return {
        "error": relative_error(torch.cat(shards), exact, parse_codec(spec).name in _NO_MAGNITUDE),
        "bits": 8 * account.bytes_wire / (vector.numel() - shard.numel()),
        "extra": account.extra_collectives,
    }


def scattered(vector: Tensor, unit: Unit, world_size: int) -> Tensor:
    """Lay out a vector of whole blocks as `fully_shard` does: chunk after chunk, rows of each
    block."""
    sizes = [block.rows * block.columns for block in unit.blocks]
    return torch.cat([part.view(world_size, -1) for part in vector.split(sizes)], 1).flatten()


def relative_error(received: Tensor, exact: Tensor, scale: bool = False) -> float:
    """Return |received - exact| / |exact|, of the vector with the magnitude of `exact` if asked."""
    received, exact = received.double(), exact.double()
    if scale:
        received = received * (exact.abs().mean() / received.abs().mean())
    return float((received - exact).norm() / exact.norm())


def speed_cells(codec: Codec, x: Tensor, repetitions: int, _: dist.ProcessGroup) -> list[str]:
    """Return GB of float32 encoded per second, shares of memcpy and gains by a second thread."""
    touched, calls = codec_calls(codec, x)
    # CPU time, which other programs affect only through caches and memory
    one = best_times(calls, repetitions, clock=time.thread_time)
    alone, both = (best_times(calls, repetitions, threads) for threads in (1, 2))
    shares = shares_of_copy(touched, one)
    gains = [alone[name] / both[name] for name in shares]
    return [figure(n) for n in (4e-9 * x.numel() / one["encode"], *shares.values(), *gains)]


def codec_calls(codec: Codec, x: Tensor) -> tuple[dict[str, int], dict[str, Callable[[], object]]]:
    """Return the bytes that an ideal single pass touches, and the calls, by name; with memcpy."""
    n = x.numel()
    residual, out = torch.zeros_like(x), torch.zeros_like(x)
    keys = [KEY._replace(rank=rank) for rank in range(max(PAYLOADS))]
    encoded = [codec.encode(x, key).clone() for key in keys]
    # consecutive as in an all-to-all: separate allocations begin at the same offset of a page and
    # evict each other from caches
    payloads = Buffers().messages("received", [payload.numel() for payload in encoded], x.device)
    for payload, source in zip(payloads, encoded, strict=True):
        payload.copy_(source)
    buffer = torch.empty(codec.payload_bytes(n), dtype=torch.uint8, device=x.device)
    wire = encoded[0].numel()

    def summing(count: int) -> Callable[[], object]:
        return lambda: codec.decode_sum(payloads[:count], out, 1 / count, keys[:count])

    touched = {"memcpy": 8 * n, "encode": 4 * n + wire, "encode + residual": 12 * n + wire}
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: out.copy_(x),
        "encode": lambda: codec.encode(x, KEY, buffer),
        "encode + residual": lambda: codec.encode_residual(x, residual, residual, KEY, buffer),
    }
    for count in PAYLOADS:
        touched[f"sum of {count}"] = 4 * n + count * wire
        calls[f"sum of {count}"] = summing(count)
    return touched, calls


def shares_of_copy(touched: dict[str, int], seconds: dict[str, float]) -> dict[str, float]:
    """Return bytes touched per second of each call, as a share of memcpy's."""
    memcpy = touched["memcpy"] / seconds["memcpy"]
    return {n: touched[n] / s / memcpy for n, s in seconds.items() if n != "memcpy"}


def _number(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 1e-3 else figure(value)


if __name__ == "__main__":
    main()
