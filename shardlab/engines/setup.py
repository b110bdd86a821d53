"""What an engine is told besides the model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardlab.core.strategy import Strategy
from shardlab.engines.base import Optimization

Fill = Callable[[nn.Module], None]
"""gives what lies below a module its weights, on the device that computes"""


@dataclass(frozen=True)
class Setup:
    """How an engine trains a model."""

    strategy: Strategy
    """in its normal form"""
    optimization: Optimization
    group: dist.ProcessGroup
    """of all ranks"""
    seed: int
    """of random codecs"""
    device: torch.device
    """that computes"""
    fill: Fill
