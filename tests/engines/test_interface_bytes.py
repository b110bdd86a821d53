"""The ledger counts every byte that a rank sends: its interface differs by headers alone."""

import time

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.emulated_link import Links, link_counters
from shardlab.core.link import FRAME_HEADERS, Link
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from tests.ranks import run_ranks

LENGTH, STEPS = 32, 2
# messages so large that what is sent beside them does not count
STRATEGIES = [
    *(({"engine": engine}, 8_000) for engine in ("ddp", "fsdp2", "manual")),
    ({"engine": "ddp", "gradients": {"codec": "int8"}}, 50_257),
    *(
        pytest.param({"engine": "ddp", "gradients": {"codec": c}}, 50_257, marks=pytest.mark.long)
        for c in ("topk", "powersgd")
    ),
]


HYBRID = {"engine": "fsdp2", "sharding": "hybrid_shard", "replicas": 2}
ON_NODES = [
    {"engine": "ddp"},
    {"engine": "fsdp2"},
    {"engine": "ddp", "gradients": {"codec": "none", "between_nodes": "int8"}},
    HYBRID,
    {**HYBRID, "gradients": {"codec": "none", "between_nodes": "int8"}},
    {"engine": "slide"},
]


def counters(group):
    """Bytes and frames that this rank's node has sent so far, and bytes over its loopback."""
    dist.barrier(group)
    time.sleep(0.3)  # what was handed to the kernel is on the link by then
    return torch.tensor(link_counters(), dtype=torch.float64)


class Steps:
    """Steps of a strategy, and what they send."""

    def __init__(self, group, strategy, vocabulary):
        model = build_model(Model(preset="tiny"), vocabulary, LENGTH, 0, seed=1).whole()
        optimization = Optimization()
        self.engine = build_engine(model, parse_strategy(strategy), optimization, group)
        self.group, self.vocabulary = group, vocabulary
        self.generator = torch.Generator().manual_seed(dist.get_rank(group))

    def run(self, steps=STEPS):
        for _ in range(steps):
            tokens = torch.randint(self.vocabulary, (1, LENGTH + 1), generator=self.generator)
            self.engine.step([tokens], 1e-3)

    def sent(self, steps=STEPS):
        """Bytes by the ledger, those between nodes among them, and by the counters."""
        self.engine.ledger.reset()
        before = counters(self.group)
        self.run(steps)
        interface = counters(self.group) - before
        accounts = self.engine.ledger.accounts.values()
        ledger = [[a.bytes_wire, a.bytes_between_nodes] for a in accounts]
        return {"ledger": torch.tensor(ledger).sum(0), "interface": interface}


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "vocabulary"), STRATEGIES, ids=str)
def test_ledger_and_interface_differ_by_headers_alone(permitted, strategy, vocabulary):
    def on_rank(group):
        steps = Steps(group, strategy, vocabulary)
        steps.run()
        return steps.sent()

    with Links(2, Link(rate="1gbit")) as links:
        ranks = run_ranks(2, on_rank, links=links)
    ledger, between = sum(rank["ledger"] for rank in ranks).tolist()
    nbytes, frames, inside = sum(rank["interface"] for rank in ranks).tolist()
    assert ledger <= nbytes - FRAME_HEADERS * frames < 1.01 * ledger
    assert nbytes < 1.03 * ledger
    assert between == inside == 0, "the launcher names one node"


@pytest.mark.long
@pytest.mark.parametrize("strategy", ON_NODES, ids=str)
def test_counters_confirm_the_bytes_of_both_tiers(permitted, strategy):
    def on_rank(group):
        steps = Steps(group, strategy, 20_000)
        steps.run()
        return steps.sent()

    with Links(4, Link(rate="1gbit", ranks_per_node=2)) as links:
        ranks = run_ranks(4, on_rank, links=links)
    ledger, between = sum(rank["ledger"] for rank in ranks).tolist()
    nbytes, frames, inside = sum(rank["interface"] for rank in ranks[::2]).tolist()
    assert between <= nbytes - FRAME_HEADERS * frames < 1.05 * between
    if strategy["engine"] == "slide":  # its ranks read each other's memory
        assert inside < 0.02 * between
    else:
        assert ledger - between <= inside < 1.05 * (ledger - between)


@pytest.mark.long
def test_no_byte_leaves_a_node_between_exchanges(permitted):
    def on_rank(group):
        steps = Steps(group, {**HYBRID, "sync": {"every": 3}}, 20_000)
        steps.run(3)
        alone, exchanged = steps.sent(2), steps.sent(1)
        return {"alone": alone["interface"][:1]} | exchanged

    with Links(4, Link(rate="1gbit", ranks_per_node=2)) as links:
        ranks = run_ranks(4, on_rank, links=links)
    for rank in ranks:
        # the barrier of the test
        assert float(rank["alone"]) < 3000 < 1e6 < float(rank["ledger"][1])
    between = sum(float(rank["ledger"][1]) for rank in ranks[:2])
    assert between <= float(ranks[0]["interface"][0]) < 1.1 * between
