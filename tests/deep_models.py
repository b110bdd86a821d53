"""Models of many equal parts on real ranks, and how far the memory of a rank grows meanwhile."""

import ctypes
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from shardlab.config.strategy import parse_strategy
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import Shape, shape_config
from shardlab.models.weights import RandomWeights


def highest_since_reset() -> int:
    """Bytes of resident memory at their highest since the last call of `reset`."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def keep_no_freed_memory() -> None:
    """The C library gives blocks of a MiB and more back at once: none lie between others.

    Where there is no free block for them in the heap: see `clean_heap` of `run_ranks`.
    """
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    assert libc.mallopt(m_mmap_threshold, 2**20) == 1
    # the library raises it to twice the largest block that was freed before
    assert libc.mallopt(m_trim_threshold, 2**17) == 1


def deep_model(layers=16, width=384):
    """Blocks that hold nearly all of its parameters; on the meta device."""
    config = shape_config(Shape(layers, width, 8), 512, 16, 0)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def size_of(model) -> int:
    """Bytes of its parameters."""
    return 4 * sum(p.numel() for p in model.parameters())


def engine_of(model, strategy, group, clip=1.0, accumulation=None):
    weights = RandomWeights(model, 0)
    optimization = Optimization(weight_decay=0.1, clip=clip, accumulation=accumulation)
    return build_engine(model, parse_strategy(strategy), optimization, group, weights=weights)
