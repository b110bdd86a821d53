"""The whole model of an engine at once."""

from torch import Tensor

from shardlab.engines.base import Engine


def whole_parameters(engine: Engine) -> dict[str, Tensor]:
    """Copies, by name, on every rank."""
    every = engine.whole_parameters()
    return {name: tensor.clone() for parts in every for name, tensor in parts.items()}
