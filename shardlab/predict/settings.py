"""Parameters of the forecast."""

from typing import Annotated

from pydantic import Field

from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.types import Name
from shardlab.strategy.codec_options import Int4Spec, Int8Spec
from shardlab.strategy.compression import Compression, WeightCodec
from shardlab.strategy.sync import Sync


class Space(Document):
    """Codecs and synchronisations of parameters that the search may propose, besides those of the
    strategies: what codecs cost is calibrated."""

    gradients: Annotated[tuple[Compression, ...], AS_TUPLE] = tuple(
        Compression.model_validate({"codec": codec, "error_feedback": feedback})
        for codec, feedback in (
            ("bf16", False),
            ("int8:group=128", False),
            ("int4:group=128", True),
            ("topk:density=0.05", True),
            ("fp8:format=e4m3", False),
            ("efsign:group=512", True),
            ("powersgd:rank=4", True),
            ("onebit:group=512", True),
            ("topk:density=0.01", True),
        )
    )
    """codecs of gradients; coarse ones with error feedback, without which they lose most of a
    gradient"""
    weights: Annotated[tuple[WeightCodec, ...], AS_TUPLE] = (Int8Spec(group=128),)
    """codecs of gathered parameters"""
    sync: Annotated[tuple[Sync, ...], AS_TUPLE] = (
        Sync(every=8),
        Sync(every=32, codec=Int4Spec(group=128), error_feedback=True),
    )
    """synchronisations of the parameters of replicas that train apart between them, in place of the
    gradients of every step"""


class Forecast(Document):
    """Measurements that the performance model is fitted on, and strategies that it predicts."""

    timings: Annotated[tuple[Name, ...], AS_TUPLE] = Field((), min_length=1)
    """timings that the model is fitted on, that of `comparison` by default; it is validated on all
    others"""
    runs: Annotated[tuple[Name, ...], AS_TUPLE] = Field((), min_length=1)
    """runs of these timings to fit on, `baseline` by default; it is validated on their other
    runs"""
    ranks: Annotated[tuple[Annotated[int, Field(ge=2, le=2**24)], ...], AS_TUPLE] = Field(
        (8, 64, 512, 4096, 16384), min_length=1
    )
    """numbers of ranks to extrapolate to"""
    links: Annotated[tuple[Name, ...], AS_TUPLE] = Field(
        (*(f"ethernet-{rate}g" for rate in (1, 10, 25, 100)), "dgx-a100", "dgx-h100"), min_length=1
    )
    """presets of `shardlab.predict.clusters` to extrapolate to"""
    space: Space = Space()
    """codecs to calibrate besides those of the timings, for strategies that were never timed"""
