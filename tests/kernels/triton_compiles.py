"""Compiles every Triton kernel for the NVIDIA GPU of the argument, such as 90; needs none.

Prints the instructions by which a kernel would round otherwise than the specification: fused
multiply-adds, approximations, and those that flush subnormal numbers.
"""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardlab.kernels.triton import grouped
from shardlab.kernels.triton.formats import FORMATS

FIRST = next(iter(FORMATS))
INEXACT = re.compile(r"\b(?:fma\.|\w[\w.]*\.(?:approx|full|ftz)\b)[\w.]*")
TILE = {"ROWS": 16, "WIDTH": 64}
POINTERS = {
    **dict.fromkeys(("x", "residual", "kept", "out", "values", "decoded"), "*fp32"),
    **dict.fromkeys(("heads", "codes", "coded"), "*u8"),
    "payloads": "*i64",
    "alpha": "fp32",
}


def compile_kernel(kernel, **constants) -> list[str]:
    types = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, types, constexprs=constants)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    text = triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]
    return sorted(set(INEXACT.findall(text)))


for name, format in FORMATS.items():
    sizes = {"HEAD_BYTES": format.head_bytes, "BITS": format.bits}
    tile = {**TILE, **sizes, "PLANES": 8 // (format.bits % 8 or 8), "VALUE": format.value}
    functions = {"HEAD": format.head, "CODE": format.code}
    # what is compiled without a residual or a sum is a part of what is compiled with it
    variants = (True, False) if name == FIRST else (True,)
    for flag in variants:
        flags = {"RESIDUAL": flag, "KEEP": flag}
        print(
            f"{name} encode", compile_kernel(grouped._encode_kernel, **flags, **tile, **functions)
        )
        print(f"{name} decode", compile_kernel(grouped._decode_kernel, ADD=flag, **tile))
