"""Counter-based random numbers (shardlab/kernels/random.py) in Triton."""

import triton
import triton.language as tl


@triton.jit
def random_bits(element, k0, k1):
    """32 bits for each of the elements (uint32), uint32."""
    x = element * 0x9E3779B9 + k0.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15) ^ k1.to(tl.uint32)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def uniform(element, k0, k1):
    """float32 in [0, 1): the upper 24 of the bits, times 2**-24."""
    return (random_bits(element, k0, k1) >> 8).to(tl.float32) * 5.9604644775390625e-08
