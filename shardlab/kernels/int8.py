"""Eight-bit integers with one scale per group.

Layout: `shardlab.kernels.grouped`, with a head of 2 bytes (scale, bfloat16) and codes of 8 bits (a
signed integer). An element decodes to `code * scale`, exactly representable in float32.

* scale = (largest magnitude of the group) / 127 in float32, raised to 2**-126 (the smallest normal
  number: no host flushes it to zero), rounded up to bfloat16: no code is clipped.
* code = x times the float32 reciprocal of the scale (one division per group), rounded to the
  nearest integer, ties to even; or, stochastically, down to an integer f and up to f + 1 with the
  probability that leaves the mean at x (the random number of the element is below x - f).
* A group of zeros has scale 0 and codes 0.
* A group that holds NaN, infinity or a magnitude of 2**127 and more has scale NaN (0x7FC0) and
  codes 0: every element of it decodes to NaN, which the receiver detects in the sum.

With a residual, what is lost is exactly representable in float32: what is sent and what is kept add
up to what was given.
"""

from shardlab.kernels.grouped import GroupedKernel
from shardlab.kernels.integers import IntegerFormat

KERNEL = GroupedKernel(IntegerFormat("int8", 8, 127))
STOCHASTIC = GroupedKernel(IntegerFormat("int8_stochastic", 8, 127, stochastic=True))
