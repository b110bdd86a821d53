"""Dropout: what the engines drop is what plain torch drops after the same seeds."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from tests.drawn_weights import drawn_model
from tests.engines.engine_cases import LENGTH, VOCABULARY, batch_of
from tests.ranks import on_ranks

SIZES = Model(preset="tiny", dropout=0.2), VOCABULARY, LENGTH, 0, 1
STEPS, RANKS, MICRO = 3, 2, 2


def seeds_of(step: int, rank: int) -> list[int]:
    return [1000 * step + 100 * rank + micro for micro in range(MICRO)]


def plain() -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and norms of a loop of plain torch over the micro-batches of all ranks."""
    model = build_model(*SIZES).whole()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for rank in range(RANKS):
            for micro, seed in enumerate(seeds_of(step, rank)):
                tokens = batch_of(step, micro, rank)
                torch.manual_seed(seed)
                logits = model(input_ids=tokens[:, :-1]).logits
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / (RANKS * MICRO)).backward()
                total += loss.item() / (RANKS * MICRO)
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses), torch.tensor(norms)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(RANKS)
def test_engines_drop_what_plain_torch_drops(group, engine, checkpointing) -> None:
    """Also where backward computes activations again, which must drop the same."""
    document = {"engine": engine, "activation_checkpointing": checkpointing, "accumulation": MICRO}
    model, weights = drawn_model(*SIZES)
    strategy, optimization = parse_strategy(document), Optimization(clip=0.5)
    made = build_engine(model, strategy, optimization, group, weights=weights)
    rank = dist.get_rank(group)
    outcomes = [
        made.step([batch_of(step, m, rank) for m in range(MICRO)], 1e-3, seeds_of(step, rank))
        for step in range(STEPS)
    ]
    losses = torch.tensor([outcome.loss for outcome in outcomes])
    dist.all_reduce(losses, group=group)
    norms = torch.tensor([outcome.gradient_norm for outcome in outcomes])
    expected = plain()
    torch.testing.assert_close((losses / RANKS, norms), expected, rtol=1e-4, atol=0)
