"""The codec that the kept elements of a sparse vector travel with."""

from shardlab.codecs.base import Codec

_CODECS = {"fp32": "none", "fp16": "fp16", "bf16": "bf16", "int8": "int8", "int4": "int4"}
"""by the `values` option of a sparse codec; group sizes are the codecs' own defaults"""


def value_codec(values: str) -> Codec:
    """The codec for the option `values` of a sparse codec.

    Raises:
        UserError: there is none of that name.
    """
    # the registry knows the sparse codecs, so it cannot be imported before them
    from shardlab.codecs.registry import make_codec

    return make_codec(_CODECS.get(values, values))
