"""Shapes of a model made for tests."""

import math

from shardlab.config.strategy import CanonicalStrategy
from shardlab.config.timing_record import UnitSize
from shardlab.models.memory import Sizes, UnitShape


class MadeShapes:
    """A model of a root and two equal blocks, of as many parameters as the records say."""

    layers, samples, on_gpu = 2, 8, False
    root, block = 688_000, 312_000

    def units(self, strategy: CanonicalStrategy) -> list[UnitSize]:
        whole = self.root + self.layers * self.block
        if strategy.bucket_mb is not None:
            count = math.ceil(4 * whole / strategy.bucket_mb / 2**20)
            sizes = [whole // count] * count
        elif strategy.wrap == "root":
            sizes = [whole]
        else:
            sizes = [self.root, *[self.block] * self.layers]
        return [UnitSize(name=f"unit{number}", elements=n) for number, n in enumerate(sizes)]

    def sizes(self, strategy: CanonicalStrategy) -> Sizes:
        narrow = 2 if strategy.param_dtype == "bf16" else 4
        units = self.units(strategy)[1:] if strategy.wrap == "block" else []
        kept = [strategy.reshard_after_forward is False] * len(units)
        for override in strategy.overrides:
            for layer in override.layers or ():
                kept[layer] = override.reshard_after_forward is False
        whole, parts = self.root + self.layers * self.block, strategy.accumulation or 1
        return Sizes(
            parameters=whole,
            trained=whole,
            units=tuple(
                UnitShape(each.elements, each.elements, stays, narrow)
                for each, stays in zip(units, kept, strict=True)
            ),
            element_bytes=narrow,
            checkpointing=(strategy.activation_checkpointing or "none",) * self.layers,
            **{"width": 96, "queries": 96, "keys": 96, "feed_forward": 384, "wide": 5},
            vocabulary=2048,
            tokens=self.samples // parts * 64,
            accumulation=parts,
        )
