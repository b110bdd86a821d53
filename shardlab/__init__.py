"""shardlab: a reproducible laboratory for sharded training of language models.

`shardlab.attach(model, gradients="int8")`, `shardlab.LayerAdam(model.parameters())`,
`shardlab.SlidingCheckpoint.on_disk(folder)` and `shardlab.SlideFSDP(model)` serve alone, in
anybody's training script.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.activations.checkpoint import SlidingCheckpoint as SlidingCheckpoint
    from shardlab.comm.attach import attach as attach
    from shardlab.comm.handle import merge_states as merge_states
    from shardlab.standalone.adam import LayerAdam as LayerAdam
    from shardlab.standalone.slide_config import SlideConfig as SlideConfig
    from shardlab.standalone.slide_fsdp import SlideFSDP as SlideFSDP
    from shardlab.strategy.codec_options import CodecSpec as CodecSpec
    from shardlab.strategy.codec_table import register as register

__all__ = [
    "CodecSpec",
    "LayerAdam",
    "SlideConfig",
    "SlideFSDP",
    "SlidingCheckpoint",
    "attach",
    "merge_states",
    "register",
]

_PLACES = {
    "CodecSpec": "shardlab.strategy.codec_options",
    "LayerAdam": "shardlab.standalone.adam",
    "SlideConfig": "shardlab.standalone.slide_config",
    "SlideFSDP": "shardlab.standalone.slide_fsdp",
    "SlidingCheckpoint": "shardlab.activations.checkpoint",
    "attach": "shardlab.comm.attach",
    "merge_states": "shardlab.comm.handle",
    "register": "shardlab.strategy.codec_table",
}


def __getattr__(name: str) -> Any:
    """Loads the public names on first use: most stages need no torch."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
