"""shardlab: a reproducible laboratory for sharded training of language models.

`shardlab.attach(model, gradients="int8")` serves alone, in anybody's training script.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.comm.attach import attach as attach

__all__ = ["attach"]


def __getattr__(name: str) -> Any:
    """Loads the public names on first use: most stages need no torch."""
    if name == "attach":
        from shardlab.comm.attach import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
