"""Compiles every Triton kernel for the NVIDIA GPU of the argument, such as 90; needs none.

Prints the kernels with a fused multiply-add: those would round otherwise than the specification.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardlab.kernels.triton import grouped, select
from shardlab.kernels.triton.formats import FORMATS

FIRST = next(iter(FORMATS))
TILE = {"ROWS": 16, "WIDTH": 64}
POINTERS = {
    **dict.fromkeys(("x", "residual", "kept", "out", "values"), "*fp32"),
    **dict.fromkeys(("counts", "prefix", "smallest", "wanted", "above", "equal"), "*i32"),
    **dict.fromkeys(("above_before", "equal_before", "indices"), "*i32"),
    "payload": "*u8",
    "payloads": "*i64",
    "alpha": "fp32",
}


def compile_kernel(kernel, **constants) -> str:
    types = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, types, constexprs=constants)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]


for name, format in FORMATS.items():
    tile = {**TILE, "BITS": format.bits, "PLANES": 8 // format.bits, "VALUE": format.value}
    functions = {"HEAD": format.head, "CODE": format.code}
    # what is compiled without a residual or a sum is a part of what is compiled with it
    variants = (True, False) if name == FIRST else (True,)
    for residual in variants:
        text = compile_kernel(grouped._encode_kernel, RESIDUAL=residual, **tile, **functions)
        print(f"{name} encode", "fma" in text)
    for add in variants:
        print(f"{name} decode", "fma" in compile_kernel(grouped._decode_kernel, ADD=add, **tile))
for kernel, constants in (
    (select._histogram_kernel, {"SHIFT": 24, "BLOCK": 2048}),
    (select._count_kernel, {"BLOCK": 2048}),
    (select._write_kernel, {"BLOCK": 2048}),
):
    print(kernel.__name__, "fma" in compile_kernel(kernel, **constants))
