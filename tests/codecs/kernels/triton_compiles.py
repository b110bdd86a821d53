"""Compiles Triton kernels for the NVIDIA GPU of an argument, such as 90; needs none.

    python tests/codecs/kernels/triton_compiles.py 90 [SHARE SHARES]

compiles every kernel, or of each SHARES that follow one another that of the number SHARE.

Prints, for each, the instructions that round otherwise than the specification: fused multiply-adds,
approximations, and those that flush subnormal numbers.
"""

import re
import sys
from itertools import count

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardlab.codecs.kernels.triton import (
    checksum,
    grouped,
    indices,
    random,
    scatter,
    select,
    sign,
    sketch,
)
from shardlab.codecs.kernels.triton.formats import FORMATS

CAPABILITY, SHARE, SHARES = map(int, sys.argv[1:] if len(sys.argv) > 2 else (sys.argv[1], 0, 1))
NUMBERS = count()
FIRST = next(iter(FORMATS))
INEXACT = re.compile(r"\b(?:fma\.|\w[\w.]*\.(?:approx|full|ftz)\b)[\w.]*")
BLOCK = {"BLOCK": 1024}
TILE = {"ROWS": 16, "WIDTH": 64}
POINTERS = {
    **dict.fromkeys(("x", "residual", "kept", "out", "values", "decoded", "before"), "*fp32"),
    **dict.fromkeys(("places", "state", "lengths"), "*i32"),
    **dict.fromkeys(("heads", "codes", "lower", "upper", "payload"), "*u8"),
    **dict.fromkeys(("payloads", "stops"), "*i64"),
    **{"table": "*fp32", "estimates": "*fp32", "words": "*i32"},
    **{"data": "*i64", "header": "*i64"},
    **{"sums": "*fp32", "folds": "*fp64", "counts": "*i32", "alpha": "fp32"},
}
WIDE = {"sums": "*i64"}
"""pointers of `checksum` with names that others have for narrower ones"""
KERNELS = (
    (checksum._sum_kernel, BLOCK),
    (checksum._mix_kernel, BLOCK),
    (sign._mean_kernel, BLOCK),
    (sign._keep_kernel, BLOCK),
    (sign._vote_kernel, {"ADD": True, "PLANES": 8, **TILE}),
    (scatter._add_kernel, BLOCK),
    (random._places_kernel, BLOCK),
    *(
        (sketch._estimate_kernel, {"ROWS": rows, "WIDTH": width, "BLOCK": 2048 // width})
        for rows, width in ((1, 2), (5, 8), (15, 16))
    ),
    (indices._lower_kernel, BLOCK),
    (indices._upper_kernel, BLOCK),
    (indices._count_kernel, BLOCK),
    (indices._place_kernel, BLOCK),
    (select._at_least_kernel, {"RESIDUAL": True, "KEEP": True, **BLOCK}),
    (select._histogram_kernel, {"RESIDUAL": True, "SHIFT": 24, **BLOCK}),
    (select._digit_kernel, {}),
    (select._count_kernel, {"RESIDUAL": True, **BLOCK}),
    (select._write_kernel, {"RESIDUAL": True, "KEEP": True, **BLOCK}),
    (select._rest_kernel, {"AT_PLACES": True, **BLOCK}),
)
"""with their constants"""


def compile_kernel(name, kernel, constants, **integers) -> None:
    """Compile for any numbers, or for those given: Triton makes constants of ones."""
    if next(NUMBERS) % SHARES != SHARE:
        return
    constants = constants | integers
    known = POINTERS | (WIDE if kernel.fn.__module__ == checksum.__name__ else {})
    types = {
        each: "constexpr" if each in constants else known.get(each, "i32")
        for each in kernel.arg_names
    }
    source = ASTSource(kernel, types, constexprs=constants)
    target = GPUTarget("cuda", CAPABILITY, 32)
    text = triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]
    print(name, sorted(set(INEXACT.findall(text))))


def compile_twice(name, kernel, constants) -> None:
    """Compile for any numbers, and for all of those that are specialised being 1."""
    compile_kernel(name, kernel, constants)
    free = {each.name for each in kernel.params if not each.do_not_specialize}
    assert {"k0", "k1", "k", "size"}.isdisjoint(free), "every message would be compiled for"
    integers = free - POINTERS.keys() - constants.keys()
    compile_kernel(f"{name} of ones", kernel, constants, **dict.fromkeys(integers, 1))


for name, format in FORMATS.items():
    sizes = {"HEAD_BYTES": format.head_bytes, "BITS": format.bits}
    tile = {**TILE, **sizes, "PLANES": 8 // (format.bits % 8 or 8), "VALUE": format.value}
    functions = {**tile, "HEAD": format.head, "CODE": format.code}
    # what is compiled without a residual or a sum is a part of what is compiled with it
    compile_kernel(
        f"{name} encode", grouped._encode_kernel, {"RESIDUAL": True, "KEEP": True, **functions}
    )
    compile_kernel(f"{name} decode", grouped._decode_kernel, {"ADD": True, **tile})
    if name == FIRST:
        functions |= {"RESIDUAL": False, "KEEP": False}
        compile_twice(f"{name} encode alone", grouped._encode_kernel, functions)
        compile_twice(f"{name} sum", grouped._decode_kernel, {"ADD": False, **tile})
for kernel, constants in KERNELS:
    compile_twice(kernel.__name__, kernel, constants)
