"""The options of every codec, so that a strategy can be checked without importing torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shardlab.core.document import Document

Group = Annotated[int, Field(ge=8, le=4096, multiple_of=8)]
Density = Annotated[float, Field(gt=0, le=1)]
Rounding = Literal["nearest", "stochastic"]
Values = Literal["fp32", "fp16", "bf16", "int8", "int4"]
Indices = Literal["smaller", "bitmap", "varint"]


class NoneSpec(Document):
    """No compression: float32 as it is."""

    name: Literal["none"] = "none"


class Fp16Spec(Document):
    """Rounded to float16."""

    name: Literal["fp16"] = "fp16"


class Bf16Spec(Document):
    """Rounded to bfloat16."""

    name: Literal["bf16"] = "bf16"


class Fp8Spec(Document):
    """Eight-bit floats with one scale per group."""

    name: Literal["fp8"] = "fp8"
    format: Literal["e4m3", "e5m2"] = "e4m3"
    """bits of exponent and mantissa"""
    group: Group = 128
    """elements that share one scale"""


class Int8Spec(Document):
    """Eight-bit integers with one scale per group."""

    name: Literal["int8"] = "int8"
    group: Group = 128
    """elements that share one scale"""
    rounding: Rounding = "nearest"


class Int4Spec(Document):
    """Four-bit codes with one scale per group."""

    name: Literal["int4"] = "int4"
    group: Group = 128
    """elements that share one scale"""
    rounding: Rounding = "nearest"
    levels: Literal["uniform", "nf4"] = "uniform"
    """integers, or the 16 levels of NormalFloat"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.levels == "nf4" and self.rounding == "stochastic":
            raise ValueError("levels: nf4 are rounded to the nearest: remove rounding: stochastic")
        return self


class Dynamic8Spec(Document):
    """Eight-bit dynamic tree data type with one scale per group."""

    name: Literal["dynamic8"] = "dynamic8"
    group: Group = 256
    """elements that share one scale"""


class QsgdSpec(Document):
    """Stochastic levels of the Euclidean norm of a group."""

    name: Literal["qsgd"] = "qsgd"
    levels: Literal[1, 7, 127] = 127
    """levels above zero: codes of 2, 4 or 8 bits"""
    group: Group = 128
    """elements that share one norm"""


class NaturalSpec(Document):
    """Stochastic powers of two."""

    name: Literal["natural"] = "natural"


class SignSpec(Document):
    """Signs, of which the majority over ranks wins."""

    name: Literal["sign"] = "sign"


class EfSignSpec(Document):
    """Signs with the mean magnitude of a group."""

    name: Literal["efsign"] = "efsign"
    group: Group = 512
    """elements that share one magnitude"""


class OneBitSpec(Document):
    """Signs with the mean of the negative and of the other elements of a group."""

    name: Literal["onebit"] = "onebit"
    group: Group = 512
    """elements that share two means"""


class TopKSpec(Document):
    """The largest elements by magnitude."""

    name: Literal["topk"] = "topk"
    density: Density = 0.01
    """share of the elements that is sent"""
    values: Values = "fp32"
    """how the kept elements travel"""
    indices: Indices = "smaller"
    """how their places travel: as whichever is smaller, or always so"""


class RandomKSpec(Document):
    """Elements at random places that all ranks know without being told."""

    name: Literal["randomk"] = "randomk"
    density: Density = 0.01
    """share of the elements that is sent"""
    scaled: bool = False
    """multiply by 1 / density: unbiased, but not for error feedback"""


class ThresholdSpec(Document):
    """The elements of at least a given magnitude."""

    name: Literal["threshold"] = "threshold"
    threshold: float = Field(gt=0)
    """smallest magnitude that is sent"""
    cap: Density = 0.05
    """largest share of the elements that is sent"""
    values: Values = "fp32"
    """how the kept elements travel"""
    indices: Indices = "smaller"
    """how their places travel: as whichever is smaller, or always so"""


class SketchSpec(Document):
    """A count sketch finds the largest elements of the sum; a second round sends them exactly."""

    name: Literal["sketch"] = "sketch"
    rows: int = Field(5, ge=1, le=15)
    """independent hash functions; the estimate is their median"""
    width: Density = 0.02
    """buckets of a row, as a share of the elements"""
    density: Density = 0.01
    """share of the elements that is sent exactly"""


class GradiVeqSpec(Document):
    """Principal components of slices of the gradient, learned in uncompressed steps."""

    name: Literal["gradiveq"] = "gradiveq"
    slice: int = Field(256, ge=8, le=4096)
    """elements of a slice"""
    components: int = Field(32, ge=1)
    """coefficients that are sent for a slice"""
    refresh: int = Field(50, ge=2)
    """steps from one uncompressed step, which renews the components, to the next"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.components >= self.slice:
            raise ValueError(
                f"components: {self.components} of a slice of {self.slice} save nothing: choose "
                "fewer"
            )
        return self


class PowerSgdSpec(Document):
    """A product of two thin matrices for each parameter."""

    name: Literal["powersgd"] = "powersgd"
    rank: int = Field(4, ge=1, le=128)
    """columns of the thin matrices"""


SPECS: dict[str, type[Document]] = {
    spec.model_fields["name"].default: spec
    for spec in (
        NoneSpec,
        Fp16Spec,
        Bf16Spec,
        Fp8Spec,
        Int8Spec,
        Int4Spec,
        Dynamic8Spec,
        QsgdSpec,
        NaturalSpec,
        SignSpec,
        EfSignSpec,
        OneBitSpec,
        TopKSpec,
        RandomKSpec,
        ThresholdSpec,
        SketchSpec,
        GradiVeqSpec,
        PowerSgdSpec,
    )
}
"""by name"""

SUMMABLE = ("none", "randomk")
"""codecs whose payloads can be summed on the wire"""
MULTI_PHASE = ("sketch", "gradiveq", "powersgd")
"""codecs that take several rounds of messages instead of one payload"""
SPARSE = ("topk", "randomk", "threshold")
"""codecs that leave elements out"""
