"""shardlab: a reproducible laboratory for sharded training of language models.

`shardlab.attach(model, gradients="int8")`, `shardlab.LayerAdam(model.parameters())`,
`shardlab.SlidingCheckpoint.on_disk(folder)` and `shardlab.SlideFSDP(model, strategy)` serve alone,
in any training script.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.comm.attach import attach as attach
    from shardlab.comm.handle import merge_states as merge_states
    from shardlab.engines.layer_adam import LayerAdam as LayerAdam
    from shardlab.engines.slide_fsdp import SlideFSDP as SlideFSDP
    from shardlab.engines.sliding_checkpoint import SlidingCheckpoint as SlidingCheckpoint
    from shardlab.strategy.codec_options import CodecSpec as CodecSpec
    from shardlab.strategy.codec_table import register as register
    from shardlab.strategy.compression import Compression as Compression
    from shardlab.strategy.compression import WeightCompression as WeightCompression
    from shardlab.strategy.document import Strategy as Strategy
    from shardlab.strategy.sync import Sync as Sync

__version__ = "0.1.0"

__all__ = [
    "CodecSpec",
    "Compression",
    "LayerAdam",
    "SlideFSDP",
    "SlidingCheckpoint",
    "Strategy",
    "Sync",
    "WeightCompression",
    "attach",
    "merge_states",
    "register",
]

_PLACES = {
    "CodecSpec": "shardlab.strategy.codec_options",
    "Compression": "shardlab.strategy.compression",
    "LayerAdam": "shardlab.engines.layer_adam",
    "SlideFSDP": "shardlab.engines.slide_fsdp",
    "SlidingCheckpoint": "shardlab.engines.sliding_checkpoint",
    "Strategy": "shardlab.strategy.document",
    "Sync": "shardlab.strategy.sync",
    "WeightCompression": "shardlab.strategy.compression",
    "attach": "shardlab.comm.attach",
    "merge_states": "shardlab.comm.handle",
    "register": "shardlab.strategy.codec_table",
}


def __getattr__(name: str) -> Any:
    """Loads the public names on first use: most stages need no torch."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names the public names, so that interpreters complete them."""
    return [*__all__]
