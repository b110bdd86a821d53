"""A small GPT-2 on any engine, and copies that are slow or fail."""

import functools
import pickle
import random
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from shardlab.engines.base import EngineSetup, Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.slide import SlideEngine
from shardlab.engines.slide_transfers import Copies
from shardlab.models.build import shape_config
from shardlab.models.random_weights import RandomWeights
from shardlab.models.settings import Shape
from shardlab.models.units import prepare
from shardlab.strategy.document import parse_strategy
from tests.drawn_weights import DrawnWeights

LAYERS, VOCABULARY, LENGTH, BATCH = 4, 96, 16, 2
MODES = {
    f"{transfer}-{sync}": {"engine": "slide", "param_transfer": transfer, "grad_sync": sync}
    for transfer in ("full", "shard")
    for sync in ("cpu_reduce", "gpu_reduce")
}
CPU = torch.device("cpu")


class PoisoningCopies(Copies):
    """Every copy takes a time of its own, in which what will be written holds NaN."""

    def __init__(self, seed):
        super().__init__(CPU)
        self._random = random.Random(seed)

    def copy(self, target, source):
        target.fill_(torch.nan)
        time.sleep(self._random.random() * 2e-3)
        super().copy(target, source)


class FailingCopies(Copies):
    """Works so many times."""

    def __init__(self, good):
        super().__init__(CPU)
        self._good = good

    def copy(self, target, source):
        self._good -= 1
        if self._good < 0:
            raise OSError("the link is down")
        super().copy(target, source)


@functools.cache
def model_and_weights(layers, seed):
    """For all engines of a process; the model is pickled, since `deepcopy` takes longer."""
    config = shape_config(Shape(layers, 32, 2), VOCABULARY, LENGTH, 0)
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return pickle.dumps(model), DrawnWeights(model, RandomWeights(model, seed))


def engine_of(
    group,
    document,
    clip=0.5,
    copies=None,
    seed=1,
    ranks_per_node=None,
    accumulation=None,
    layers=LAYERS,
    frozen=(),
):
    """With copies of its own, of the slide engine.

    Args:
        frozen: parts of the names of parameters that are not trained.
    """
    pickled, weights = model_and_weights(layers, seed)
    model = pickle.loads(pickled)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    optimization = Optimization(clip=clip)
    strategy = parse_strategy({**document, "accumulation": accumulation})
    if copies is None and ranks_per_node is None:
        return build_engine(model, strategy, optimization, group, weights=weights)
    names = {module: name for name, module in model.named_modules()}
    full = strategy.canonical()
    prepare(model, full)

    def fill(module):
        weights.materialize(module, names[module])

    setup = EngineSetup(full, optimization, group, 0, CPU, fill)
    return SlideEngine(model, setup, copies, ranks_per_node)


def batch_of(step, rank, micro=0):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def train(engine, steps, micro=1, first=0):
    """The losses and the norms of gradients of each step."""
    rank = dist.get_rank()
    reported = []
    for step in range(first, first + steps):
        batches = [batch_of(step, rank, number) for number in range(micro)]
        outcome = engine.step(batches, 1e-3)
        reported.append((outcome.loss, outcome.gradient_norm))
    return torch.tensor(reported)


def weights_of(engine):
    """All parameters by name, whole."""
    return {
        name: part.clone() for whole in engine.whole_parameters() for name, part in whole.items()
    }


def states_of(engine):
    """Parameters and moments by KIND.NAME, whole."""
    return {
        f"{kind}.{name}": part.clone()
        for kind, tensors in engine.shards().items()
        for entry, tensor in tensors.items()
        for name, part in engine.gather(entry, tensor).items()
    }


def differing(found, expected):
    """The names of tensors whose bits differ."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]
