"""Estimate the memory of every run before it, in closed form."""

from pathlib import Path

import torch

from shardlab.config.parameters import Parameters
from shardlab.config.run_record import Estimate
from shardlab.core.files import write_json
from shardlab.core.progress import say
from shardlab.data.tokens import read_manifest
from shardlab.models.build import build_model
from shardlab.models.memory import closed_form, host_memory
from shardlab.models.sizes import sizes_of
from stages.common import SAMPLES, refuse_other_tokens, run

_CPU = torch.device("cpu")


def main(params: Parameters) -> None:
    """Write results/memory.json."""
    refuse_other_tokens(params)
    model, strategies, train = params("model", "strategies", "train")
    train = train.only(*SAMPLES, "world_size", "clip")
    tokens = read_manifest(Path("data/tokens"))
    sizes = tokens.vocabulary, train.sequence_length, tokens.end_of_text
    module = build_model(model, *sizes, seed=0).module
    estimates = {}
    for name, strategy in strategies.items():
        case = strategy, sizes_of(module, strategy, train, _CPU), train.world_size
        # the device is the CPU, so host memory counts
        by_category = {**closed_form(*case), **host_memory(*case)}
        estimates[name] = Estimate(bytes_by_category=by_category).model_dump()
    write_json("results/memory.json", estimates)
    say(f"estimate: memory of {len(strategies)} runs in results/memory.json")


if __name__ == "__main__":
    run(main)
