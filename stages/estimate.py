"""Estimate the memory of every run before it: traced without data, and in closed form."""

from pathlib import Path

import torch

from shardlab.config.parameters import Parameters
from shardlab.config.run_record import Estimate
from shardlab.config.strategy import Strategy
from shardlab.core.files import write_json
from shardlab.core.progress import say
from shardlab.data.tokens import read_manifest
from shardlab.forecast.traced_memory import imagined_ranks, traced_memory
from shardlab.models.build import build_model
from shardlab.models.memory_sizes import Categories
from shardlab.models.memory_step import closed_form, host_memory
from shardlab.models.unit_sizes import sizes_of
from stages.common import SAMPLES, run

_CPU = torch.device("cpu")


def main(params: Parameters) -> None:
    """Write results/memory.json."""
    model, strategies, train = params("model", "strategies", "train")
    train = train.only(*SAMPLES, "world_size", "clip")
    tokens = read_manifest(Path("data/tokens"))
    sizes = tokens.vocabulary, train.sequence_length, tokens.end_of_text
    module = build_model(model, *sizes, seed=0).module
    estimates = {}

    def traced(name: str, strategy: Strategy) -> Categories | None:
        try:
            return traced_memory(module.config, strategy, train, group)
        except Exception as error:  # some models have operators without fake tensor support
            say(f"estimate: {name}: not traced: {' '.join(str(error).split())[:200]}")
            return None

    with imagined_ranks(train.world_size) as group:
        for name, strategy in strategies.items():
            given = strategy, sizes_of(module, strategy, train, _CPU), train.world_size
            # the device is the CPU, so host memory counts
            formula = {**closed_form(*given), **host_memory(*given)}
            estimate = Estimate(traced=traced(name, strategy), closed_form=formula)
            estimates[name] = estimate.model_dump()
    write_json("results/memory.json", estimates)
    say(f"estimate: memory of {len(strategies)} runs in results/memory.json")


if __name__ == "__main__":
    run(main)
