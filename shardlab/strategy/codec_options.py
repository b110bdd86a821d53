"""Specifications of the built-in codecs: every class that derives from `CodecSpec` is one.

The factories are named, not imported: a strategy is validated without torch.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from shardlab.core.document import Document

GroupSize = Annotated[int, Field(ge=8, le=4096, multiple_of=8)]
Density = Annotated[float, Field(gt=0, le=1)]
Rounding = Literal["nearest", "stochastic"]
Values = Literal["fp32", "fp16", "bf16", "int8", "int4"]
Indices = Literal["smaller", "elias_fano", "bitmap"]


class CodecSpec(Document):
    """Name, options and traits of one codec.

    A subclass declares `name: Literal["int8"] = "int8"` and its options as fields, and its traits
    as class variables. Its docstring is the description that tables and judges show.
    `shardlab.strategy.codec_table` holds all of them.
    """

    name: str
    """as strategies write it"""

    factory: ClassVar[str | Callable[..., Any]] = ""
    """makes the codec from the options as keyword arguments. `"module:Class"` is imported when the
    first codec is made: stages that only read strategies start without torch"""
    examples: ClassVar[tuple[str, ...]] = ()
    """specs as text that the laws, the golden payloads and the benchmarks are run with"""
    summable: ClassVar[bool] = False
    """payloads can be summed on the wire: an all-reduce encodes once"""
    multi_phase: ClassVar[bool] = False
    """sums vectors in several collectives instead of one payload per message"""
    sparse: ClassVar[bool] = False
    """leaves elements out, so that it cannot serve parameters"""
    votes: ClassVar[bool] = False
    """decodes the payloads of several ranks to their majority, where others have a sum"""
    one_bit: ClassVar[bool] = False
    """has no code for zero"""
    most_ranks: ClassVar[int | None] = None
    """ranks that can sum with it; None: any number"""
    needs_matrices: ClassVar[bool] = False
    """factors matrices and leaves flat vectors as they are"""

    def feedback_conflict(self) -> str | None:
        """Return why these options must not be combined with error feedback, with the fix."""
        return None

    def most_sent(self) -> float:
        """Return the largest fraction of the elements that a message holds."""
        return 1.0


class NoneSpec(CodecSpec):
    """No compression: float32 as it is."""

    factory = "shardlab.codecs.identity:Identity"
    examples = ("none",)
    summable = True

    name: Literal["none"] = "none"


class Fp16Spec(CodecSpec):
    """Rounded to float16."""

    factory = "shardlab.codecs.floats:Float16"
    examples = ("fp16",)

    name: Literal["fp16"] = "fp16"


class Bf16Spec(CodecSpec):
    """Rounded to bfloat16."""

    factory = "shardlab.codecs.floats:BFloat16"
    examples = ("bf16", "bf16:rounding=stochastic")

    name: Literal["bf16"] = "bf16"
    # written where it differs alone: strategies and calibrations from before it have none
    rounding: Rounding = Field("nearest", exclude_if=lambda value: value == "nearest")
    """nearest, or stochastic, which is unbiased"""


class Fp8Spec(CodecSpec):
    """Eight-bit floats with one scale per group."""

    factory = "shardlab.codecs.floats:Fp8"
    examples = ("fp8:format=e4m3", "fp8:format=e5m2,group=8")

    name: Literal["fp8"] = "fp8"
    format: Literal["e4m3", "e5m2"] = "e4m3"
    """bits of exponent and mantissa"""
    group: GroupSize = 128
    """elements that share one scale"""


class Int8Spec(CodecSpec):
    """Eight-bit integers with one scale per group."""

    factory = "shardlab.codecs.integers:Int8"
    examples = ("int8:group=8", "int8:group=128", "int8:rounding=stochastic")

    name: Literal["int8"] = "int8"
    group: GroupSize = 128
    """elements that share one scale"""
    rounding: Rounding = "nearest"
    """nearest, or stochastic, which is unbiased"""


class Int4Spec(CodecSpec):
    """Four-bit codes with one scale per group."""

    factory = "shardlab.codecs.integers:Int4"
    examples = ("int4:group=8", "int4:group=128", "int4:rounding=stochastic", "int4:levels=nf4")

    name: Literal["int4"] = "int4"
    group: GroupSize = 128
    """elements that share one scale"""
    rounding: Rounding = "nearest"
    """nearest, or stochastic, which is unbiased"""
    levels: Literal["uniform", "nf4"] = "uniform"
    """integers, or the 16 levels of NormalFloat"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.levels == "nf4" and self.rounding == "stochastic":
            raise ValueError("levels: nf4 are rounded to nearest: remove rounding: stochastic")
        return self


class Dynamic8Spec(CodecSpec):
    """Eight-bit dynamic tree data type with one scale per group."""

    factory = "shardlab.codecs.floats:Dynamic8"
    examples = ("dynamic8",)

    name: Literal["dynamic8"] = "dynamic8"
    group: GroupSize = 256
    """elements that share one scale"""


class QsgdSpec(CodecSpec):
    """Stochastic levels of the Euclidean norm of a group."""

    factory = "shardlab.codecs.integers:Qsgd"
    examples = ("qsgd:levels=1", "qsgd:levels=5", "qsgd:levels=7", "qsgd:levels=127")

    name: Literal["qsgd"] = "qsgd"
    levels: int = Field(127, ge=1, le=127)
    """levels above zero: codes of 2 bits for 1, of 4 up to 7, of 8 above"""
    group: GroupSize = 128
    """elements that share one norm"""


class NaturalSpec(CodecSpec):
    """Stochastic powers of two."""

    factory = "shardlab.codecs.floats:Natural"
    examples = ("natural",)

    name: Literal["natural"] = "natural"


class SignSpec(CodecSpec):
    """Signs, decided by a majority vote of the ranks."""

    factory = "shardlab.codecs.signs:Sign"
    examples = ("sign",)
    votes = True
    one_bit = True

    name: Literal["sign"] = "sign"


class EfSignSpec(CodecSpec):
    """Signs with the mean magnitude of a group."""

    factory = "shardlab.codecs.signs:EfSign"
    examples = ("efsign:group=8", "efsign:group=512")
    one_bit = True

    name: Literal["efsign"] = "efsign"
    group: GroupSize = 512
    """elements that share one magnitude"""


class OneBitSpec(CodecSpec):
    """Signs with the mean of the negative and of the other elements of a group."""

    factory = "shardlab.codecs.signs:OneBit"
    examples = ("onebit:group=8", "onebit:group=512")
    one_bit = True

    name: Literal["onebit"] = "onebit"
    group: GroupSize = 512
    """elements that share two means"""


class TopKSpec(CodecSpec):
    """The largest elements by magnitude."""

    factory = "shardlab.codecs.sparse:TopK"
    examples = (
        "topk:density=0.01",
        "topk:density=0.3",
        "topk:density=0.05,values=int8",
        "topk:density=0.1,values=int4,indices=elias_fano",
        "topk:density=0.2,values=bf16,indices=bitmap",
        "topk:density=0.2,values=fp16",
    )
    sparse = True

    name: Literal["topk"] = "topk"
    density: Density = 0.01
    """fraction of the elements that is sent"""
    values: Values = "fp32"
    """format of the kept elements"""
    indices: Indices = "smaller"
    """format of their positions: whichever is smaller, or always the given one"""

    def most_sent(self) -> float:  # noqa: D102
        return self.density


class RandomKSpec(CodecSpec):
    """Elements at random positions that all ranks draw alike, so that none are sent."""

    factory = "shardlab.codecs.randomk:RandomK"
    examples = (
        "randomk:density=0.1",
        "randomk:density=0.3,scaled=true",
        "randomk:density=0.7,values=int8",
        "randomk:density=0.2,values=fp16",
    )
    sparse = True

    name: Literal["randomk"] = "randomk"
    density: Density = 0.01
    """fraction of the elements that is sent"""
    scaled: bool = False
    """multiply by 1 / density: unbiased, but not for error feedback"""
    values: Values = "fp32"
    """format of the sent elements; all but fp32 are decoded before they are summed"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scaled and self.values != "fp32":
            raise ValueError(
                f"scaled: true is unbiased, and values: {self.values} are not: remove one of them"
            )
        return self

    @property
    def summable(self) -> bool:  # type: ignore[override]  # a trait that an option decides
        """Return whether payloads can be summed on the wire."""
        return self.values == "fp32"

    def feedback_conflict(self) -> str | None:  # noqa: D102
        return "scaled: true diverges with error_feedback: remove one of them" * self.scaled or None

    def most_sent(self) -> float:  # noqa: D102
        return self.density


class ThresholdSpec(CodecSpec):
    """The elements of at least a given magnitude."""

    factory = "shardlab.codecs.sparse:Threshold"
    examples = (
        "threshold:threshold=0.5,cap=0.1",
        "threshold:threshold=2,values=int8,indices=elias_fano",
    )
    sparse = True

    name: Literal["threshold"] = "threshold"
    threshold: float = Field(gt=0)
    """smallest magnitude that is sent"""
    cap: Density = 0.05
    """largest fraction of the elements that is sent"""
    values: Values = "fp32"
    """format of the kept elements"""
    indices: Indices = "smaller"
    """format of their positions: whichever is smaller, or always the given one"""

    def most_sent(self) -> float:  # noqa: D102
        return self.cap


class SketchSpec(CodecSpec):
    """A count sketch finds the largest elements of the sum; a second phase sends them exactly."""

    factory = "shardlab.codecs.sketch:Sketch"
    examples = ("sketch:rows=5,width=0.1,density=0.05", "sketch:rows=4,width=0.01,density=0.3")
    multi_phase = True

    name: Literal["sketch"] = "sketch"
    rows: int = Field(5, ge=1, le=15)
    """independent hash functions; the estimate is their median"""
    width: Density = 0.02
    """buckets of a row, as a fraction of the elements"""
    density: Density = 0.01
    """fraction of the elements that is sent exactly"""

    def most_sent(self) -> float:  # noqa: D102
        return self.density


class GradiVeqSpec(CodecSpec):
    """Principal components of slices of the gradient, learned in uncompressed steps."""

    factory = "shardlab.codecs.gradiveq:GradiVeQ"
    examples = (
        "gradiveq:slice=16,components=4,refresh=3",
        "gradiveq:slice=256,components=32,refresh=2",
    )
    multi_phase = True

    name: Literal["gradiveq"] = "gradiveq"
    slice: int = Field(256, ge=8, le=4096)
    """elements of a slice"""
    components: int = Field(32, ge=1)
    """coefficients that are sent for a slice"""
    refresh: int = Field(50, ge=2)
    """steps from one uncompressed step, which recomputes the components, to the next"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.components >= self.slice:
            raise ValueError(
                f"components: {self.components} of a slice of {self.slice} save nothing: choose "
                "fewer"
            )
        return self


class PowerSgdSpec(CodecSpec):
    """A product of two thin matrices for each parameter."""

    factory = "shardlab.codecs.powersgd:PowerSgd"
    examples = ("powersgd:rank=1", "powersgd:rank=3")
    multi_phase = True
    needs_matrices = True

    name: Literal["powersgd"] = "powersgd"
    rank: int = Field(4, ge=1, le=128)
    """columns of the thin matrices"""


class SharedInt8Spec(CodecSpec):
    """Eight-bit integers with scales that all ranks share, summed as integers by the backend."""

    factory = "shardlab.codecs.shared_integers:SharedInt8"
    examples = ("int8-shared", "int8-shared:group=8")
    multi_phase = True
    most_ranks = 127

    name: Literal["int8-shared"] = "int8-shared"
    group: GroupSize = 128
    """elements that share one scale"""
