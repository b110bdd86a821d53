"""Engines reduce once per step, as much as theory says, and with codecs less."""

import pytest
import torch

from tests.engines.engine_cases import LOSSY, STRATEGIES, losses_of, make, train
from tests.ranks import run_ranks
from tests.whole_parameters import whole_parameters


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2-ahead", "manual", "slide-full-cpu"])
def test_gradients_are_reduced_once_per_step(name):
    def on_rank(group):
        counts = []
        for micro in (1, 3):
            engine = make(group, STRATEGIES[name])
            engine.ledger.reset()
            train(engine, group, 2, micro=micro)
            counts.append(engine.ledger.summary()["gradients"]["collectives"])
        return {"counts": torch.tensor(counts)}

    counts = run_ranks(2, on_rank)[0]["counts"]
    assert counts[0] == counts[1] > 0


def test_fsdp2_gathers_and_reduces_as_often_as_theory_says():
    def on_rank(group):
        engine = make(group, {"engine": "fsdp2"})
        train(engine, group, 1)
        summary = engine.ledger.summary()
        parameters = sum(p.numel() for p in whole_parameters(engine).values())
        gathers, reduces = summary["weights"], summary["gradients"]
        return {
            "collectives": torch.tensor([gathers["collectives"], reduces["collectives"]]),
            "raw": torch.tensor([gathers["bytes_raw"], reduces["bytes_raw"]]),
            "wire": torch.tensor([gathers["bytes_wire"], reduces["bytes_wire"]]),
            "parameters": torch.tensor(parameters),
        }

    result = run_ranks(2, on_rank)[0]
    blocks, root = 2, 1
    assert result["collectives"].tolist() == [2 * blocks + root, blocks + root]
    gathered, reduced = result["raw"].tolist()
    # half of every tensor, padded to whole rows per rank: never less than 4N/2
    assert 2 * result["parameters"] <= reduced <= 2.02 * result["parameters"]
    assert reduced < gathered < 2 * reduced
    assert result["wire"].tolist() == [gathered, 2 * reduced]


@pytest.mark.parametrize("name", LOSSY)
def test_compressed_training_moves_fewer_bytes_and_keeps_ranks_equal(name):
    def on_rank(group):
        engine = make(group, LOSSY[name])
        losses = train(engine, group, 2)
        engine.ledger.reset()
        losses = torch.cat([losses, train(engine, group, 2, first=2)])
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
