"""The lookup table: known answers, and lines of a script that run as they are printed."""

import os
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.predict.lookup import STOCK, advise, lookup_table, share, steps_between
from tests.ranks import on_ranks


def ratios(stock, int8=4, int4=8):
    return {STOCK: stock, "int8": stock / int8, "int4": stock / int4}


@pytest.mark.parametrize(
    ("stock", "use"),
    [
        (0.1, "stock data parallel"),
        (0.12, "int8 gradients"),
        (0.44, "int8 gradients"),
        (0.45, "int4 gradients"),
        (0.88, "int4 gradients"),
        (0.9, "int4 every 8 steps"),
        (7.1, "int4 every 8 steps"),
        (7.2, "int4 every 32 steps"),
        (28.4, "int4 every 32 steps"),
        (28.5, "int4 every 128 steps"),
        (1000, "int4 every 128 steps"),  # not enough, but the least
    ],
)
def test_the_mildest_row_that_is_enough_is_taken(stock, use):
    assert advise(ratios(stock), lookup_table()).use == use


def test_codecs_that_take_longer_than_they_save_are_passed_over():
    assert advise(ratios(0.12, int8=0.5, int4=0.5), lookup_table()).every == 8
    assert advise(ratios(0.1, int8=0.5, int4=0.5), lookup_table()).codec == STOCK


def test_goal_is_a_share_of_the_whole_step():
    assert share(1) == 0.5 and share(0) == 0
    row = advise(ratios(0.9), lookup_table(), goal=0.5)
    assert row.use == "stock data parallel"


@pytest.mark.parametrize(
    ("ratio", "goal", "every"), [(1, 0.05, 19), (1, 0.1, 9), (10, 0.1, 90), (0.01, 0.1, 1)]
)
def test_steps_between_exchanges_that_take_a_share_of_the_time(ratio, goal, every):
    assert steps_between(ratio, goal) == every
    assert share(ratio / every) <= goal + 1e-9
    assert every == 1 or share(ratio / (every - 1)) > goal


def exact(row):
    """The lowest ratio of compression of a row: 4 of 8 bits for 32, and 8 of 4, without scales."""
    return {STOCK: 1, "int8": 3, "int4:group=32": 5}[row.codec]


def linear():
    torch.manual_seed(0)  # replicas begin alike
    return nn.Linear(64, 64)


def trained(model, row):
    """Gradients in the ledger after as many steps as the row has between two exchanges."""
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    line, *end = (row.attach or "handle = shardlab.attach(model)").splitlines()
    exec(line, {"shardlab": shardlab}, names)
    for _ in range(row.every):
        model(torch.ones(1, 64)).sum().backward()
        names["optimizer"].step()
    exec("\n".join(end), {}, names)
    return names["handle"].ledger.summary()["gradients"]


@on_ranks(2)
def test_attach_takes_the_line_as_it_is_printed(group):
    for row in lookup_table("int4:group=32")[:4]:
        found = trained(DistributedDataParallel(linear()), row)
        assert found["bytes_raw"] > 0 and found["compression_ratio"] >= exact(row)


@pytest.mark.long
@on_ranks(4)
def test_attach_takes_the_line_between_nodes(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        table = lookup_table("int4:group=32", nodes=2)[:4]
        sent = [
            trained(fully_shard(linear(), mesh=mesh), row)["bytes_between_nodes"] / row.every
            for row in table
        ]
    for row, nbytes in zip(table, sent, strict=True):
        assert 0 < nbytes <= sent[0] / (exact(row) * row.every), row.use
