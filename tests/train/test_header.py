"""What a run says of its sharding, with counts that are known."""

import pytest
import torch

from shardlab.models.settings import Model
from shardlab.results.result import UnitSize
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from shardlab.train.header import sharding
from shardlab.train.plans import RunPlan
from shardlab.train.settings import Train
from tests.engines.small_engine import engine_of
from tests.ranks import run_ranks

BLOCK = 12 * 32 * 32 + 13 * 32
ROOT = (96 + 16) * 32 + 2 * 32
PARAMETERS = 4 * BLOCK + ROOT
"""of GPT-2 with 4 blocks of width 32, 96 tokens and 16 positions"""


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_keep_a_model_once_together_or_whole(engine):
    """Two ranks; shards have at most one more element than half of each unit."""

    def on_rank(group):
        return {"held": torch.tensor(engine_of(group, {"engine": engine}).held_elements())}

    held = [int(result["held"]) for result in run_ranks(2, on_rank)]
    if engine == "ddp":
        assert held == [PARAMETERS] * 2
    else:
        assert PARAMETERS <= sum(held) <= PARAMETERS + 10 and abs(held[0] - held[1]) <= 10


@pytest.mark.parametrize(
    "strategy, held, said",
    [
        (
            {"engine": "fsdp2"},
            [500, 500],
            "a seed 3: fsdp2, 1,000 parameters (root of 200, 2 units of 400); each of 2 ranks "
            "keeps 500 (50 %), 2 kB and with moments 6 kB",
        ),
        (
            {"engine": "slide", "moment_dtype": "bf16"},
            [510, 490],
            "a seed 3: slide, 1,000 parameters (root of 200, 2 units of 400); each of 2 ranks "
            "keeps 490 to 510 (51 %), 2.04 kB and with moments 4.08 kB",
        ),
        (
            {"engine": "ddp"},
            [1000],
            "a seed 3: ddp, 1,000 parameters (root of 200, 2 units of 400); each of 1 rank "
            "keeps all, 4 kB and with moments 12 kB",
        ),
    ],
)
def test_the_line_has_the_units_and_the_bytes_of_a_rank(strategy, held, said):
    plan = RunPlan("a", 3, parse_strategy(strategy), Train(), Model(preset="tiny"))
    units = [UnitSize(name=n, elements=e) for n, e in (("root", 200), ("h.0", 400), ("h.1", 400))]
    assert sharding(plan, units, held) == said


def test_a_matrix_that_muon_trains_has_one_moment():
    plan = RunPlan("a", 3, parse_strategy({"engine": "ddp"}), Train(), Model(preset="tiny"))
    units = [UnitSize(name="root", elements=1000)]
    assert sharding(plan, units, [1000, 1000], matrices=500).endswith("4 kB and with moments 10 kB")
