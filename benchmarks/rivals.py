"""Our codecs compared with those of other packages: one table of ratios by task.

    make rivals
    python -m benchmarks.rivals [SPEC ...] [--repetitions R] [--data FOLDER] [--work FOLDER]
                                [--rivals FOLDER] [--out FOLDER]

One thread, the same real gradient of 16 Mi elements, buffers reused where the package lets one.
Calls of both sides take turns, on a GPU where there is one, and the fastest repetition counts.
SPEC: only the rivals of these of our codecs. A package that does not work has its error.
"""

import os
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.codecs import KEY, relative_error
from benchmarks.common import (
    DATA,
    RIVAL_PACKAGES,
    WORK,
    arguments,
    best_times,
    clock_of,
    on_ranks,
    publish,
    text_table,
)
from benchmarks.gradients import load_gradients
from shardlab.codecs.registry import make_codec
from shardlab.comm.object_collectives import device_of
from shardlab.core.errors import UserError
from shardlab.core.numbers import ABSENT, figure
from shardlab.core.progress import say

ROW = 128
"""elements that share a scale, where the package lets one choose"""
_DENSITY, _FAILURE_WIDTH = 0.01, 120


class Calls(NamedTuple):
    """Calls of a codec on one vector."""

    encode: Callable[[], Any]
    decode: Callable[[], Tensor]
    """the decoded vector; it may be called after `encode`"""
    wire_bytes: int


class Rival(NamedTuple):
    """Codec of another package for a task, and ours for the same."""

    task: str
    name: str
    ours: str
    make: Callable[[Tensor], Calls]


def _size(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _fbgemm_int8(x: Tensor) -> Calls:
    import fbgemm_gpu  # noqa: F401

    rows, ops = x.view(-1, ROW), torch.ops.fbgemm
    packed, out = ops.FloatToFused8BitRowwiseQuantized(rows), torch.empty_like(rows)
    return Calls(
        lambda: ops.FloatToFused8BitRowwiseQuantizedOut(packed, rows),
        lambda: ops.Fused8BitRowwiseQuantizedToFloatOut(out, packed),
        _size(packed),
    )


def _fbgemm_int4(x: Tensor) -> Calls:
    import fbgemm_gpu  # noqa: F401

    rows, ops = x.view(-1, ROW), torch.ops.fbgemm
    packed = ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4)
    return Calls(
        lambda: ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4),
        lambda: ops.FusedNBitRowwiseQuantizedSBHalfToFloat(packed, 4),
        _size(packed),
    )


def _bitsandbytes_8bit(x: Tensor) -> Calls:
    """Decode into new memory: the operator with `out` does not exist on the CPU."""
    from bitsandbytes import functional

    codes, state = functional.quantize_blockwise(x, blocksize=256)
    return Calls(
        lambda: functional.quantize_blockwise(
            x, code=state.code, absmax=state.absmax, out=codes, blocksize=256
        ),
        lambda: functional.dequantize_blockwise(codes, state, blocksize=256),
        _size(codes, state.absmax),
    )


def _bitsandbytes_nf4(x: Tensor) -> Calls:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(x, blocksize=ROW, quant_type="nf4")
    return Calls(
        lambda: functional.quantize_4bit(
            x, absmax=state.absmax, out=codes, blocksize=ROW, quant_type="nf4"
        ),
        lambda: functional.dequantize_4bit(codes, state),
        _size(codes, state.absmax),
    )


def _torch_cast(dtype: torch.dtype) -> Callable[[Tensor], Calls]:
    def make(x: Tensor) -> Calls:
        short, out = x.to(dtype), torch.empty_like(x)
        return Calls(lambda: short.copy_(x), lambda: out.copy_(short), _size(short))

    return make


def _torch_topk(x: Tensor) -> Calls:
    """Return values and int32 indices, as any top-k on `torch.topk` has to send them."""
    k = round(_DENSITY * x.numel())
    out = torch.empty_like(x)

    def encode() -> tuple[Tensor, Tensor]:
        index = torch.topk(x.abs(), k, sorted=False).indices
        return x[index], index.to(torch.int32)

    values, index = encode()
    return Calls(
        encode, lambda: out.zero_().index_add_(0, index.long(), values), _size(values, index)
    )


RIVALS = [
    Rival("8 bit", f"FBGEMM int8, rows of {ROW}", "int8:group=128", _fbgemm_int8),
    Rival("8 bit", "bitsandbytes blockwise 8 bit", "dynamic8:group=256", _bitsandbytes_8bit),
    Rival("4 bit", f"FBGEMM FusedNBit int4, rows of {ROW}", "int4:group=128", _fbgemm_int4),
    Rival("4 bit", "bitsandbytes nf4", "int4:group=128,levels=nf4", _bitsandbytes_nf4),
    Rival("16 bit", "torch cast to float16", "fp16", _torch_cast(torch.float16)),
    Rival("16 bit", "torch cast to bfloat16", "bf16", _torch_cast(torch.bfloat16)),
    Rival("top-k 1 %", "torch.topk", "topk:density=0.01", _torch_topk),
]
_HEADINGS = [
    *("task", "theirs", "ours", "encode: ours / theirs, GB/s", "ratio"),
    *("decode: ours / theirs, GB/s", "ratio", "bits: ours / theirs", "error: ours / theirs"),
]


def main() -> None:
    args = arguments(
        __doc__,
        ("specs", "of our codecs; default: all"),
        repetitions=12,
        data=DATA,
        work=WORK,
        rivals=RIVAL_PACKAGES,
    )
    if not args.rivals.is_dir():
        raise UserError(f"{args.rivals}: no such folder: run make rivals")
    sys.path.append(str(args.rivals))
    chosen = [rival for rival in RIVALS if not args.specs or rival.ours in args.specs]
    if not chosen:
        raise UserError(f"no rival of {', '.join(args.specs)}")
    vector, rows = load_gradients(args.data, args.work).large, []
    for rival in chosen:
        rows.append([rival.task, rival.name, rival.ours, *_cells(rival, vector, args.repetitions)])
        say(f"benchmarks: {rival.name}")
    table = text_table("Ours compared with theirs", _HEADINGS, rows)
    publish(__doc__, args.out / "rivals.md", table)


def _cells(rival: Rival, vector: Tensor, repetitions: int) -> list[str]:
    """Compare in a child process, so that packages do not affect each other."""

    def work(group: dist.ProcessGroup) -> list[str]:
        os.environ["OMP_NUM_THREADS"] = "1"  # for libraries that bring an OpenMP of their own
        warnings.simplefilter("ignore")
        x = vector.to(device_of(group))
        ours = _ours(rival.ours, x)
        try:
            return _compare(ours, rival.make(x), x, repetitions)
        except Exception as error:  # any exception of a package is its result
            first = (str(error).splitlines() or [""])[0]
            reason = textwrap.shorten(first, _FAILURE_WIDTH, placeholder=" ...")
            return [f"theirs fails: {type(error).__name__}: {reason}", *[ABSENT] * 5]

    cells: list[str] = on_ranks(1, work)[0]
    return cells


def _compare(ours: Calls, theirs: Calls, x: Tensor, repetitions: int) -> list[str]:
    calls = {"encode": ours.encode, "their encode": theirs.encode}
    calls |= {"decode": ours.decode, "their decode": theirs.decode}
    times = best_times(calls, repetitions, clock=clock_of(x.device))
    encode, their_encode, decode, their_decode = (4e-9 * x.numel() / s for s in times.values())
    bits = [8 * side.wire_bytes / x.numel() for side in (ours, theirs)]
    errors = [relative_error(side.decode().flatten(), x) for side in (ours, theirs)]
    return [
        *(_pair([encode, their_encode]), f"{figure(encode / their_encode)} x"),
        *(_pair([decode, their_decode]), f"{figure(decode / their_decode)} x"),
        *(_pair(bits), _pair(errors)),
    ]


def _pair(values: list[float]) -> str:
    return " / ".join(map(figure, values))


def _ours(spec: str, x: Tensor) -> Calls:
    codec, out = make_codec(spec), torch.empty_like(x)
    buffer = torch.empty(codec.payload_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    payload = codec.encode(x, KEY).clone()

    def decode() -> Tensor:
        codec.decode_sum([payload], out, 1.0, [KEY])
        return out

    return Calls(lambda: codec.encode(x, KEY, buffer), decode, payload.numel())


if __name__ == "__main__":
    main()
