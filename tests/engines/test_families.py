"""Engines agree on models of other architectures."""

import functools

import pytest
import torch
import torch.distributed as dist

from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from tests.drawn_weights import drawn_model
from tests.engines.engine_cases import LENGTH, train
from tests.families import FAMILIES, VOCABULARY, config_of
from tests.ranks import on_ranks, run_ranks

ENDS = [{"module": "embedding"}, {"module": "head"}]
STRATEGIES = {
    **{engine: {"engine": engine} for engine in ENGINES if engine != "ddp"},
    "fsdp2": {"engine": "fsdp2", "prefetch": 1, "overrides": ENDS},
    "slide": {"engine": "slide", "param_transfer": "shard", "window": 3},
    "manual": {"engine": "manual", "activation_checkpointing": "full", "overrides": ENDS},
}
DENSE = [family for family in FAMILIES if not family.startswith(("gpt2", "mixtral"))]
"""tests/engines/test_engines.py has GPT-2"""


def make(group, folder, document):
    model, weights = drawn_model(Model(config=folder), VOCABULARY, LENGTH, 0, 1)
    optimization = Optimization(clip=0.5)
    return build_engine(model, parse_strategy(document), optimization, group, weights=weights)


@functools.cache
def losses_of(family: str, folder: str, strategy: str | None) -> torch.Tensor:
    """Mean loss over ranks of three steps; of `ddp` without a strategy."""
    document = STRATEGIES[strategy] if strategy else {"engine": "ddp"}

    def on_rank(group):
        return {"losses": train(make(group, folder, document), group, 3)}

    results = run_ranks(2, on_rank)
    return torch.stack([result["losses"] for result in results]).mean(0)


# every pair of an architecture, its tying and a strategy
@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        (family, strategy)
        for number, family in enumerate(DENSE)
        for strategy in [*STRATEGIES][(number + number // 2) % 2 :: 2]
    ],
)
def test_engines_agree_on_every_family(family, strategy, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / family
    config_of(family).save_pretrained(folder)
    losses = losses_of(family, str(folder), strategy)
    torch.testing.assert_close(losses, losses_of(family, str(folder), None), rtol=1e-5, atol=0)


@pytest.mark.parametrize("engine", ["fsdp2", "manual"])
@on_ranks(2)
def test_an_embedding_of_its_own_is_gathered_once_per_step(group, engine, tmp_path) -> None:
    config_of("llama-untied").save_pretrained(tmp_path / str(dist.get_rank(group)))
    folder, counts = str(tmp_path / str(dist.get_rank(group))), []
    for overrides in ([], ENDS):
        made = make(group, folder, {"engine": engine, "overrides": overrides})
        train(made, group, 1)
        counts.append(made.ledger.summary()["weights"]["collectives"])
    together, apart = counts
    # backward begins with the head where it is a unit, and otherwise with the last block, which
    # fsdp2 gathers again, and manual has kept
    assert apart == together + 3
