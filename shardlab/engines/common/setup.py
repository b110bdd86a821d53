"""What an engine is told besides the model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardlab.engines.common.base import Optimization
from shardlab.strategy.strategy import Strategy

Fill = Callable[[nn.Module], None]
"""gives what lies below a module its weights, on the device that computes"""


@dataclass(frozen=True)
class Setup:
    """How an engine trains a model."""

    strategy: Strategy
    """in its canonical form"""
    optimization: Optimization
    group: dist.ProcessGroup
    """of all ranks"""
    seed: int
    """of random codecs"""
    device: torch.device
    """that computes"""
    fill: Fill
