"""Two-dimensional meshes: what is summed between replicas goes through a codec too."""

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.comm.residuals import Layout
from tests.comm.wire import wire
from tests.comm.wrapped_models import backward, full, gradients_after, hsdp
from tests.ranks import run_ranks

W, S = 4, 2


def two_micro_batches(model, group, factor=None):
    """Gradients that are reduced in replicas twice and between them once."""
    if factor is not None:
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(True)
    model.zero_grad()
    for step, last in ((0, False), (1, True)):
        model.set_requires_all_reduce(last)
        backward(model, group, step)
    return torch.cat([grad.flatten() for grad in full(model, "grad").values()])


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"gradients": "int8:group=64"}, 0.02),
        ({"gradients": "none", "between_nodes": "int8", "ranks_per_node": 2}, 0.02),
        ({"gradients": "bf16", "between_nodes": "int8", "ranks_per_node": 2}, 0.02),
        ({"gradients": "powersgd:rank=4"}, 0.9),
    ],
    ids=str,
)
def test_replicas_exchange_what_a_codec_makes_of_their_sums(options, bound):
    def on_rank(group):
        exact = gradients_after(hsdp(group), group, 2)
        model = hsdp(group)
        handle = shardlab.attach(model, **options)
        lossy = gradients_after(model, group, 2)
        summary = handle.ledger.summary()["gradients"]
        assert summary["uncompressed"] == {}
        handle.detach()
        restored = gradients_after(model, group, 2)
        return {"exact": exact, "lossy": lossy, "restored": restored}

    first, *others = run_ranks(W, on_rank)
    assert all(torch.equal(first["lossy"], other["lossy"]) for other in others)
    error = (first["lossy"] - first["exact"]).norm() / first["exact"].norm()
    assert 0 < error < bound
    assert torch.equal(first["restored"], first["exact"])


def test_both_sums_are_in_the_ledger():
    def on_rank(group):
        model = hsdp(group)
        handle = shardlab.attach(model, "int8:group=64")
        backward(model, group, 0)
        handle.ledger.reset()
        with wire() as sent:
            backward(model, group, 1)
        gradients, weights = handle.ledger.accounts["gradients"], handle.ledger.accounts["weights"]
        elements = sum(p.to_local().numel() for p in model.parameters())
        return {
            "moved": torch.tensor([sent.bytes, gradients.bytes_wire + weights.bytes_wire]),
            "raw": torch.tensor(gradients.bytes_raw),
            "ratio": torch.tensor(handle.ledger.summary()["gradients"]["compression_ratio"]),
            "shard": torch.tensor(elements),
        }

    for result in run_ranks(W, on_rank):
        moved, counted = result["moved"].tolist()
        assert moved == counted
        # the shard to the other rank of the replica, and half of it twice to the other replica
        assert result["raw"] >= 2 * 4 * result["shard"]
        assert result["ratio"] > 3.5


@pytest.mark.parametrize("factor", [None, 3.0])
@pytest.mark.parametrize("route", ["native", "exchange"])
def test_uncompressed_sums_are_those_of_torch(route, factor):
    def on_rank(group):
        exact = two_micro_batches(hsdp(group), group, factor)
        model = hsdp(group)
        shardlab.attach(model, "none", route=route)
        return {"exact": exact, "found": two_micro_batches(model, group, factor)}

    for result in run_ranks(W, on_rank):
        torch.testing.assert_close(result["found"], result["exact"], rtol=1e-5, atol=1e-7)


def test_what_both_sums_hold_back_is_owed():
    steps = 4

    def on_rank(group):
        exact = sum(gradients_after(hsdp(group), group, step + 1) for step in range(steps))
        model = hsdp(group)
        handle = shardlab.attach(model, "topk:density=0.2", error_feedback=True, minimum_size=0)
        sent = 0
        for step in range(steps):
            model.zero_grad()
            backward(model, group, step)
            sent += torch.cat([grad.flatten() for grad in full(model, "grad").values()])
        state = handle.feedback.state_dict()
        layout = Layout.of(state["layout:root"])
        owed = torch.cat([state[f"root>{to}"] for to in range(S)])
        dist.all_reduce(owed)
        owed /= W
        replica, place = divmod(dist.get_rank(group), S)
        n = owed.numel() // S
        own = torch.cat([state[f"root@replicas>{to}"] for to in range(2)])[:n] / 2
        half = state["root@replicas<"].numel()
        mine = own.new_zeros(2 * half)
        mine[replica * half :][:half] = state["root@replicas<"]
        second = torch.zeros_like(owed)
        second[place * n :][:n] = own + mine[:n]
        dist.all_reduce(second)
        blocks = layout.blocks_of((owed + second).chunk(S))
        held = torch.cat([block.flatten() for block in blocks])
        return {"exact": exact, "sent": sent, "held": held}

    for result in run_ranks(W, on_rank):
        assert result["held"].norm() > 0
        torch.testing.assert_close(
            result["sent"] + result["held"], result["exact"], rtol=1e-4, atol=1e-6
        )
