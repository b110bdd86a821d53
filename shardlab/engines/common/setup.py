"""Arguments that every engine is built with, besides the model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardlab.engines.common.base import Optimization
from shardlab.strategy.strategy import CanonicalStrategy

Fill = Callable[[nn.Module], None]
"""loads the weights of a module's parameters, on the device that computes"""


@dataclass(frozen=True)
class EngineSetup:
    """Strategy, optimization, ranks and device of an engine."""

    strategy: CanonicalStrategy
    optimization: Optimization
    group: dist.ProcessGroup
    """all ranks that train the model"""
    seed: int
    """of codecs that draw random numbers"""
    device: torch.device
    """that computes"""
    fill: Fill
