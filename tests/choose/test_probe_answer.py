"""Advice on replicas: known answers, and lines of a script that run as they are printed."""

import os
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.choose.probe_answer import (
    ALONE,
    LEGEND,
    STOCK,
    Times,
    advice,
    rank_replicas,
    replicas_of,
)
from shardlab.predict.offers import replica_candidates
from shardlab.strategy.document import parse_strategy
from tests.ranks import on_ranks


def ratios(stock, int8=4.0, int4=8.0):
    return {STOCK: stock, "int8": stock / int8, "int4": stock / int4}


@pytest.mark.parametrize(
    ("stock", "count", "use"),
    [
        (0.1, 2, "ddp"),
        # two replicas do 2 / (1 + ratio) times the samples of one
        (0.8, 2, "ddp"),
        (0.82, 2, ALONE),  # a gain within the margin
        (3.0, 2, ALONE),
        (3.0, 8, "ddp"),
    ],
)
def test_without_loss_a_second_replica_has_to_gain_the_margin(stock, count, use):
    assert rank_replicas(replicas_of(ratios(stock)), count).first.name == use


@pytest.mark.parametrize("stock", [0.1, 1.0, 10.0])
def test_what_changes_training_stands_apart_with_the_steps_that_it_may_need(stock):
    offers = replicas_of(ratios(stock))
    even = rank_replicas(offers, 2).break_even
    assert {*even} == {offer.name for offer in offers if offer.lossy}
    best = max(1.0, 2 / (1 + stock))
    for offer in offers[1:]:
        assert even[offer.name] == pytest.approx(2 / (1 + offer.ratio) / best)


def test_the_mildest_that_is_not_told_apart_from_the_fastest_comes_first():
    for stock, name in (
        (0.3, "ddp, int8"),
        (0.5, "ddp, int4"),
        (1.0, "ddp, int4 every 8 steps"),
        (10.0, "ddp, int4 every 32 steps"),
        (100.0, "ddp, int4 every 128 steps"),
    ):
        excluded = rank_replicas(replicas_of(ratios(stock)), 2).apart
        assert excluded[0].option.name == name


def test_codecs_that_take_longer_than_they_save_gain_nothing():
    time = Times(1.0, 1.0, 1.0)
    times = {STOCK: time.scaled(0.1), "int8": time.scaled(0.2), "int4": time.scaled(0.2)}
    text = advice("all ranks", 2, times, 1000, "computation", time)
    assert "without loss use ddp: shown to be the fastest" in text
    assert text.endswith("nothing that changes training is faster")
    assert "handle" not in text and "even:" in LEGEND


def exact(strategy):
    """The lowest ratio of compression: 4 of 8 bits for 32, and 8 of 4, without scales."""
    codec = strategy.sync.codec if strategy.sync else strategy.gradients.codec
    between = strategy.gradients.between_nodes
    return {"none": 1, "int8": 3, "int4": 5}[(between or codec).name]


def linear():
    torch.manual_seed(0)  # replicas begin alike
    return nn.Linear(64, 64)


def trained(model, strategy):
    """Gradients in the ledger after as many steps as lie between two synchronisations."""
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    line, *end = (strategy.attach_call() or "handle = shardlab.attach(model)").splitlines()
    exec(line, {"shardlab": shardlab}, names)
    for _ in range(every(strategy)):
        model(torch.ones(1, 64)).sum().backward()
        names["optimizer"].step()
    exec("\n".join(end), {}, names)
    return names["handle"].ledger.summary()["gradients"]


def every(strategy):
    return strategy.sync.every if strategy.sync else 1


def first_offers(nodes=1):
    offers = replica_candidates("int4:group=32", nodes)[:4]
    return [parse_strategy(offer.document).canonical() for offer in offers]


@on_ranks(2)
def test_attach_takes_the_line_as_it_is_printed(group):
    for strategy in first_offers():
        sent = trained(DistributedDataParallel(linear()), strategy)
        assert sent["bytes_raw"] > 0 and sent["compression_ratio"] >= exact(strategy)


@pytest.mark.long
@on_ranks(4)
def test_attach_takes_the_line_between_nodes(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    strategies = first_offers(nodes=2)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        sent = [
            trained(fully_shard(linear(), mesh=mesh), strategy)["bytes_between_nodes"]
            / every(strategy)
            for strategy in strategies
        ]
    for strategy, nbytes in zip(strategies, sent, strict=True):
        assert 0 < nbytes <= sent[0] / (exact(strategy) * every(strategy))
