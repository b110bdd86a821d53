"""Models of any kind in the slide engine: what they use, share, checkpoint and return."""

from collections import namedtuple
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardlab
from shardlab.core.errors import UserError
from tests.engines.sliding_factory import by_hand, slid
from tests.engines.small_engine import differing
from tests.ranks import on_ranks

STEPS, BLOCKS, RATE = 4, 5, 1e-2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden, both):
        more = torch.tanh(self.second(hidden)) if both else 0
        return hidden + torch.tanh(self.first(hidden)) + more


class Experts(nn.Module):
    """Leaves out a block, or half of one, or begins with another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.outward = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x, labels, half=None, without=None, first=0):
        hidden = self.inward(x)
        for number in sorted(range(BLOCKS), key=lambda number: number != first):
            block = self.blocks[number]
            if number != without:
                hidden = block(hidden, number != half)
        return SimpleNamespace(loss=((self.outward(hidden) - labels) ** 2).mean())


class Handing(Block):
    """Also returns what it was given, or something new."""

    def __init__(self, makes):
        super().__init__()
        self.makes = makes

    def forward(self, hidden, given):
        hidden = super().forward(hidden, True)
        return hidden, torch.relu(hidden) if self.makes else given


class Passing(Experts):
    """Its blocks hand on what the one with this number has made; None: what they were given."""

    def __init__(self, maker):
        super().__init__()
        self.blocks = nn.ModuleList([Handing(number == maker) for number in range(BLOCKS)])

    def forward(self, x, labels):
        hidden = self.inward(x)
        given = torch.relu(hidden)
        for block in self.blocks:
            hidden, given = block(hidden, given)
        return SimpleNamespace(loss=((self.outward(hidden + given) - labels) ** 2).mean())


def batch_of(step, rank, left_out):
    """Every other step leaves something out."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, labels = torch.randn(2, 4, 8, generator=generator)
    return {"x": x, "labels": labels, **(left_out if step % 2 else {})}


def expected_of(model, clip, left_out):
    """The weights after a plain loop over ranks, each of which leaves something out."""
    of_ranks = [*enumerate(left_out)]
    steps = [[batch_of(step, rank, own) for rank, own in of_ranks] for step in range(STEPS)]
    return by_hand(model, steps, clip, RATE)


def check(model, expected, left_out=None, **config):
    """Slides over the model and compares."""
    sliding = slid(model, learning_rate=RATE, **config)
    for step in range(STEPS):
        sliding(**batch_of(step, dist.get_rank(), left_out or {}))
    for name, value in sliding.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("left_out", "clip", "sync"),
    [
        ({"half": 2}, None, "cpu_reduce"),
        ({"half": 2}, 0.5, "gpu_reduce"),
        ({"without": 2}, 0.5, "cpu_reduce"),
        ({"without": 0}, None, "gpu_reduce"),
    ],
)
@on_ranks(2)
def test_blocks_unused_on_one_rank_train_on_the_others_gradients(
    group, left_out, clip, sync
) -> None:
    expected = expected_of(Experts(), clip, [{}, left_out])
    own = left_out if dist.get_rank(group) == 1 else {}
    # either window with what is left out and each other setting
    window = 2 + ((clip is None) ^ (sync == "cpu_reduce") ^ ("half" in left_out))
    config = {"clip": clip, "grad_sync": sync, "window": window}
    check(Experts(), expected, own, **config)


@pytest.mark.parametrize("without", [0, 2, 4])
@on_ranks(1)
def test_unused_block_is_updated_before_its_next_use(group, without) -> None:
    clip = 0.5 if without == 2 else None
    expected = expected_of(Experts(), clip, [{"without": without}])
    for window in (2, 4):
        again = ("none", "full")[(window + without) // 2 % 2]
        config = {"window": window, "activation_checkpointing": again}
        check(Experts(), expected, {"without": without}, clip=clip, **config)


@pytest.mark.parametrize(("maker", "clip"), [(None, None), (0, 0.5), (2, None), (2, 0.5)])
@on_ranks(1)
def test_block_that_passes_an_input_on_is_updated_before_its_next_use(group, maker, clip) -> None:
    """The gradient of what it passes on is there when its own are, or long after."""
    expected = expected_of(Passing(maker), clip, [{}])
    for window in (2, 3):
        again = ("none", "full")[(window + (maker is None) + (clip is None)) % 2]
        config = {"window": window, "activation_checkpointing": again}
        check(Passing(maker), expected, clip=clip, **config)


# every pair of a reduction and a way of clipping
@pytest.mark.parametrize(
    ("other", "sync", "clip"),
    [
        ({"without": 0}, "cpu_reduce", None),
        ({"first": 2}, "gpu_reduce", 0.5),
    ],
)
@pytest.mark.fresh_ranks
@on_ranks(2)
def test_ranks_that_gather_different_layers_are_refused(group, other, clip, sync) -> None:
    strategy = {"param_transfer": "shard", "grad_sync": sync}
    sliding, rank = shardlab.SlideFSDP(Experts(), strategy, clip=clip), dist.get_rank(group)
    with pytest.raises((UserError, RuntimeError), match="set param_transfer: full"):
        for step in range(STEPS):
            sliding(**batch_of(step, rank, other if rank == 1 else {}))


Pair = namedtuple("Pair", ["loss", "logits"])
OUTPUTS = (
    lambda loss, x: SimpleNamespace(loss=loss, logits=x),
    lambda loss, x: {"loss": loss, "logits": x},
    lambda loss, x: (loss, x),
    Pair,
    lambda loss, x: loss,
    lambda loss, x: loss.view(1),
)
NO_LOSS = (
    lambda loss, x: {"logits": x},
    lambda loss, x: torch.stack([loss, loss]),
    lambda loss, x: (float(loss), x),
    lambda loss, x: loss.detach(),
)


class Blocks(nn.Module):
    """Linear layers between two others.

    Args:
        shared: names of layers that have the weight of the first block.
        ends: whether there is anything outside of the blocks.
        output: makes what it returns of loss and result.
        reentrant: checkpoints two blocks at a time, in this way.
    """

    def __init__(self, shared=(), ends=True, output=OUTPUTS[0], reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.outward = (
            nn.Linear(8, 8) if ends else nn.Identity() for _ in ("in", "out")
        )
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for module in map(self.get_submodule, shared):
            module.weight = self.blocks[0].weight
        self.output, self.reentrant = output, reentrant

    def forward(self, x):
        hidden = self.inward(x)
        for first in range(0, 4, 2):
            pair = nn.Sequential(self.blocks[first], nn.GELU(), self.blocks[first + 1], nn.Tanh())
            if self.reentrant is None:
                hidden = pair(hidden)
            else:
                hidden = checkpoint(pair, hidden, use_reentrant=self.reentrant)
        hidden = self.outward(hidden)
        return self.output(hidden.square().mean(), hidden)


def slid_weights(model, **config):
    """The weights after two steps."""
    sliding = slid(model, **config)
    for call in range(2):
        generator = torch.Generator().manual_seed(10 * call + dist.get_rank())
        sliding(x=torch.randn(4, 8, generator=generator))
    return sliding.state_dict()


@pytest.mark.parametrize("user", ["blocks.2", "outward"])
@on_ranks(1)
def test_a_parameter_that_two_units_use_is_refused(user) -> None:
    reported = f"weight belongs to blocks.0.*{user.replace('outward', 'root')} uses it"
    with pytest.raises(UserError, match=reported):
        shardlab.SlideFSDP(Blocks([user]))


@on_ranks(2)
def test_a_model_may_have_no_parameter_outside_of_its_blocks() -> None:
    for clip in (0.5, None):
        states = [
            slid_weights(Blocks(ends=False), clip=clip, param_transfer=transfer, grad_sync=sync)
            for transfer, sync in (("full", "cpu_reduce"), ("shard", "gpu_reduce"))
        ]
        assert differing(*states) == []
    before = Blocks(ends=False).state_dict()
    assert dist.get_rank() > 0 or len(differing(states[0], before)) == len(before)


@on_ranks(1)
def test_a_forward_method_that_checkpoints_blocks_trains_the_same_bits() -> None:
    straight = slid_weights(Blocks())
    for reentrant, ours in product((True, False), ("none", "full")):
        found = slid_weights(Blocks(reentrant=reentrant), activation_checkpointing=ours)
        assert differing(found, straight) == []


@on_ranks(1)
def test_layers_are_computed_again_where_the_strategy_says_so_alone() -> None:
    counts = []
    for settings in ({}, {"activation_checkpointing": "full"}):
        model, calls = Experts(), []
        layer = model.blocks[0].first
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        slid(model, **settings)(**batch_of(0, 0, {}))
        counts.append(len(calls))
    assert counts == [1, 2]


@on_ranks(1)
def test_a_loss_is_found_wherever_models_put_it_or_nothing_has_happened() -> None:
    expected = slid_weights(Blocks())
    for output in OUTPUTS:
        found = slid(Blocks(output=output))(x=torch.ones(2, 8))
        assert type(found) is type(output(torch.ones(()), None))
        assert differing(slid_weights(Blocks(output=output)), expected) == []
    assert differing(expected, Blocks().state_dict()) != []
    for output in NO_LOSS:
        sliding = slid(Blocks(output=output))
        with pytest.raises(UserError, match="returns no loss, one number"):
            sliding(x=torch.ones(2, 8))
        assert differing(sliding.state_dict(), Blocks().state_dict()) == []


@on_ranks(1)
def test_models_that_cannot_slide_are_refused() -> None:
    models = {
        "is compiled, for parameters": torch.compile(Blocks()),
        "Linear has no list of blocks": nn.Linear(2, 2),
        "distributed already": DistributedDataParallel(Blocks()),
        "inward.weight is torch.float32 on meta: give": Blocks().to("meta"),
        "is torch.float64 on cpu: give a model in float32": Blocks().double(),
        "no parameter is trained": Blocks().requires_grad_(False),
    }
    for message, model in models.items():
        with pytest.raises(UserError, match=message):
            shardlab.SlideFSDP(model)


class Counting(Blocks):
    """Has buffers of two types that a state dict has, one under two names, and one it has not."""

    def __init__(self):
        super().__init__()
        self.outward = nn.BatchNorm1d(8)
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)
        self.blocks[0].register_buffer("also", self.outward.running_mean)

    def forward(self, x):
        self.unsaved += 1
        return super().forward(x)


@on_ranks(1)
def test_buffers_that_a_state_dict_has_are_continued(tmp_path) -> None:
    models = Counting(), Counting()
    straight, other = (slid(model) for model in models)
    for _ in range(3):
        straight(x=torch.randn(4, 8))
    straight.save(tmp_path / "saved")
    expected = straight.state_dict()
    other.load(tmp_path / "saved")
    assert {"outward.num_batches_tracked", "blocks.0.also"} <= expected.keys()
    assert not differing(other.state_dict(), expected)
    assert [int(model.unsaved) for model in models] == [3, 0]
