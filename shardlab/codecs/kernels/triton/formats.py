"""Formats with Triton kernels, by the name of `shardlab.codecs.kernels.grouped.Format`."""

from shardlab.codecs.kernels.triton import floats, integers, signs
from shardlab.codecs.kernels.triton.grouped import TritonFormat

FORMATS = {
    "int8": TritonFormat(2, 8, integers.head127, integers.code8, integers.value8),
    "int8_stochastic": TritonFormat(2, 8, integers.head127, integers.drawn8, integers.value8),
    "int4": TritonFormat(2, 4, integers.signed_head8, integers.code4, integers.value4),
    "int4_stochastic": TritonFormat(2, 4, integers.head7, integers.drawn4, integers.value4),
    "qsgd1": TritonFormat(2, 2, integers.norm1, integers.drawn2, integers.value2),
    "qsgd7": TritonFormat(2, 4, integers.norm7, integers.drawn4, integers.value4),
    "qsgd127": TritonFormat(2, 8, integers.norm127, integers.drawn8, integers.value8),
    "nf4": TritonFormat(2, 4, integers.head1, integers.nf4_code, integers.nf4_value),
    "bf16": TritonFormat(0, 16, floats.no_head, floats.bf16_code, floats.bf16_value),
    "fp16": TritonFormat(0, 16, floats.no_head, floats.fp16_code, floats.fp16_value),
    "natural": TritonFormat(0, 9, floats.no_head, floats.natural_code, floats.natural_value),
    "e4m3": TritonFormat(2, 8, floats.e4m3_head, floats.e4m3_code, floats.e4m3_value),
    "e5m2": TritonFormat(2, 8, floats.e5m2_head, floats.e5m2_code, floats.e5m2_value),
    "dynamic8": TritonFormat(
        *(2, 8, floats.dynamic8_head, floats.dynamic8_code, floats.dynamic8_value)
    ),
    "efsign": TritonFormat(2, 1, signs.efsign_head, signs.sign_code, signs.efsign_value),
    "onebit": TritonFormat(4, 1, signs.onebit_head, signs.sign_code, signs.onebit_value),
}
