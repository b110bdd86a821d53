"""Our codecs compared with those of other packages: one table of ratios by task.

    make rivals
    python -m benchmarks.rivals [SPEC ...] [--data FOLDER] [--work FOLDER] [--rivals FOLDER]

One thread, the same real gradient of 16 Mi elements, buffers reused where the package lets one; the
calls of both sides are interleaved, and the fastest repetition counts. SPEC: only the rivals of
these of our codecs. A package that does not work is in the table with its error.
"""

import os
import sys
import textwrap
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.aggregation import relative
from benchmarks.common import (
    DATA,
    RIVAL_PACKAGES,
    WORK,
    arguments,
    on_ranks,
    print_table,
    write_results,
)
from benchmarks.gradients import Gradients, prepare
from benchmarks.other_codecs import RIVALS, Calls, Rival
from benchmarks.speed import KEY, Alone, best_times, clock_of
from shardlab.codecs.base import Block, Unit
from shardlab.codecs.multi_phase import Method, MultiPhaseMethod
from shardlab.codecs.registry import make_method
from shardlab.comm.object_collectives import device_of
from shardlab.core.errors import UserError
from shardlab.core.progress import say
from shardlab.report.tables import ABSENT, figure

_FAILURE_WIDTH = 120
_LIMIT_S = 20.0
"""for the repetitions of one rival; the slowest take seconds for a call"""


@dataclass(frozen=True)
class Match:
    """Comparison of one codec with ours; rates in GB of float32 per second."""

    task: str
    theirs: str
    ours: str
    failure: str | None = None
    encode: tuple[float, float] | None = None
    """ours, theirs"""
    decode: tuple[float, float] | None = None
    bits: tuple[float, float] | None = None
    error: tuple[float, float] | None = None


def main() -> None:
    args = arguments(
        __doc__,
        ("specs", "of our codecs; default: all"),
        rivals=RIVAL_PACKAGES,
        repetitions=12,
        data=DATA,
        work=WORK,
    )
    if not args.rivals.is_dir():
        raise SystemExit(f"{args.rivals}: no such folder: run make rivals")
    sys.path.append(str(args.rivals))
    chosen = [rival for rival in RIVALS if not args.specs or rival.ours in args.specs]
    if not chosen:
        raise UserError(f"no rival of {', '.join(args.specs)}")
    for rival in chosen:
        make_method(rival.ours)
    gradients = Gradients(prepare(args.data, args.work))
    matches = []
    for rival in chosen:
        matches.append(match(rival, gradients.large, args.repetitions))
        say(f"benchmarks: {rival.name}: {matches[-1].failure or 'measured'}")
    write_results(args.work / "rivals.json", matches=[asdict(m) for m in matches])
    print_matches(matches)


def match(rival: Rival, vector: Tensor, repetitions: int) -> Match:
    """Compare in a child process, so that packages do not affect each other; on a GPU if it has
    one."""
    names = {"task": rival.task, "theirs": rival.name, "ours": rival.ours}

    def work(group: dist.ProcessGroup) -> dict[str, Any]:
        os.environ["OMP_NUM_THREADS"] = "1"  # for libraries that bring an OpenMP of their own
        warnings.simplefilter("ignore")
        x = vector.to(device_of(group))
        ours = _ours(rival.ours, x)
        try:
            theirs = rival.make(x)
            return names | _compare(ours, theirs, x, repetitions)
        except Exception as error:  # any exception of a package is its result
            first = (str(error).splitlines() or [""])[0]
            reason = textwrap.shorten(first, _FAILURE_WIDTH, placeholder=" ...")
            return names | {"failure": f"{type(error).__name__}: {reason}"}

    return Match(**on_ranks(1, work)[0])


def _compare(ours: Calls, theirs: Calls, x: Tensor, repetitions: int) -> dict[str, Any]:
    calls = {
        "our encode": ours.encode,
        "their encode": theirs.encode,
        "our decode": ours.decode,
        "their decode": theirs.decode,
    }
    times = best_times(calls, repetitions, limit_s=_LIMIT_S, clock=clock_of(x.device))
    rates = {name: 4e-9 * x.numel() / seconds for name, seconds in times.items()}
    decoded = [side.decode() for side in (ours, theirs)]
    pair: dict[str, Any] = {
        "encode": (rates["our encode"], rates["their encode"]),
        "bits": tuple(8 * side.wire_bytes / x.numel() for side in (ours, theirs)),
    }
    if decoded[0] is not None and decoded[1] is not None:
        pair["decode"] = (rates["our decode"], rates["their decode"])
        pair["error"] = tuple(relative(d.flatten(), x) for d in decoded if d is not None)
    return pair


def _ours(spec: str, x: Tensor) -> Calls:
    codec: Method = make_method(spec)
    if isinstance(codec, MultiPhaseMethod):
        return _ours_in_phases(codec, x)
    n, out = x.numel(), torch.empty_like(x)
    buffer = torch.empty(codec.payload_bytes(n), dtype=torch.uint8, device=x.device)
    payload = codec.encode(x, KEY).clone()

    def decode() -> Tensor:
        codec.decode_sum([payload], out, 1.0, [KEY])
        return out

    return Calls(lambda: codec.encode(x, KEY, buffer), decode, payload.numel())


def _ours_in_phases(method: MultiPhaseMethod, x: Tensor) -> Calls:
    """Run all of a reduction on one rank, on one square matrix."""
    side = int(x.numel() ** 0.5)
    unit = Unit("square", (Block("square", side, side),))
    given, wire = x[: side * side].clone(), Alone()

    def reduce() -> None:
        given.copy_(x[: side * side])
        method.sum_scatter(given, unit, wire, KEY)

    reduce()
    wire.bytes = 0
    reduce()
    return Calls(reduce, lambda: None, wire.bytes)


def print_matches(matches: list[Match]) -> None:
    """Print the table of ratios."""
    headings = [
        "task",
        "theirs",
        "ours",
        "encode: ours / theirs, GB/s",
        "ratio",
        "decode: ours / theirs, GB/s",
        "ratio",
        "bits: ours / theirs",
        "error: ours / theirs",
    ]
    rows = []
    for match in matches:
        head = [match.task, match.theirs, match.ours]
        if match.failure is not None:
            rows.append([*head, f"theirs fails: {match.failure}", *[ABSENT] * 5])
            continue
        encode, decode = (
            [_pair(pair), f"{figure(pair[0] / pair[1])} x" if pair else ABSENT]
            for pair in (match.encode, match.decode)
        )
        rows.append([*head, *encode, *decode, _pair(match.bits), _pair(match.error)])
    print_table("Ours against theirs", headings, rows)


def _pair(pair: tuple[float, float] | None) -> str:
    return ABSENT if pair is None else f"{figure(pair[0])} / {figure(pair[1])}"


if __name__ == "__main__":
    main()
