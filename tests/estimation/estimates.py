"""Memory estimates of strategies given as JSON, printed as JSON: [[traced, closed form], ...].

Runs in a separate process: its process group is fake, and other tests fork real ranks.
"""

import json
import sys

import torch

from shardlab.estimation.sizes import sizes_of
from shardlab.estimation.traced_memory import imagined_ranks, traced_memory
from shardlab.experiment.schema import Model, Train
from shardlab.memory.step import closed_form
from shardlab.models.build import build_model
from shardlab.strategy.strategy import parse_strategy


def main() -> None:
    train = Train(batch_size=4, sequence_length=32, accumulation=int(sys.argv[1]))
    model = build_model(Model(preset="10m"), 512, 32, 0, seed=0).module
    found = []
    with imagined_ranks(4) as group:
        for document in json.loads(sys.argv[2]):
            strategy = parse_strategy(document)
            sizes = sizes_of(model, strategy, train, torch.device("cpu"))
            formula = closed_form(strategy, sizes, 4)
            found.append([traced_memory(model.config, strategy, train, group), formula])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
