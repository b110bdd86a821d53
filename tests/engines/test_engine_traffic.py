"""Engines reduce once per step, as much as theory says, and with codecs less."""

import pytest
import torch

from shardlab.strategy.engine_traits import ENGINES
from tests.engines.engine_cases import LOSSY, STRATEGIES, losses_of, make, train
from tests.ranks import on_ranks, run_ranks
from tests.whole_parameters import whole_parameters


@pytest.mark.parametrize("name", [*ENGINES, "fsdp2-ahead"])
@on_ranks(2)
def test_gradients_are_reduced_once_per_step(group, name) -> None:
    counts = []
    for micro in (1, 3):
        engine = make(group, STRATEGIES[name])
        engine.ledger.reset()
        train(engine, group, 2, micro=micro)
        counts.append(engine.ledger.summary()["gradients"]["collectives"])
    assert counts[0] == counts[1] > 0


@on_ranks(2)
def test_fsdp2_gathers_and_reduces_as_often_as_theory_says(group) -> None:
    engine = make(group, {"engine": "fsdp2"})
    train(engine, group, 1)
    summary = engine.ledger.summary()
    gathers, reduces = summary["weights"], summary["gradients"]
    parameters = sum(p.numel() for p in whole_parameters(engine).values())
    blocks, root = 2, 1
    assert gathers["collectives"] == 2 * blocks + root
    assert reduces["collectives"] == blocks + root
    # half of every tensor, padded to whole rows per rank: never less than 4N/2
    assert 2 * parameters <= reduces["bytes_raw"] <= 2.02 * parameters
    assert reduces["bytes_raw"] < gathers["bytes_raw"] < 2 * reduces["bytes_raw"]
    assert gathers["bytes_wire"] == gathers["bytes_raw"]
    assert reduces["bytes_wire"] == 2 * reduces["bytes_raw"]


@pytest.mark.parametrize("name", LOSSY)
def test_compressed_training_moves_fewer_bytes_and_keeps_ranks_equal(name):
    def on_rank(group):
        engine = make(group, LOSSY[name])
        losses = train(engine, group, 2)
        engine.ledger.reset()
        losses = torch.cat([losses, train(engine, group, 1, first=2)])
        gradients = engine.ledger.summary()["gradients"]
        total = torch.stack([p.double().sum() for p in whole_parameters(engine).values()])
        return {
            "losses": losses,
            "ratio": torch.tensor(gradients["compression_ratio"]),
            "total": total,
        }

    first, second = run_ranks(2, on_rank)
    assert torch.equal(first["total"], second["total"])
    assert first["ratio"] > 3.5
    together = (first["losses"] + second["losses"]) / 2
    torch.testing.assert_close(together, losses_of("ddp", 2), rtol=0.02, atol=0)
