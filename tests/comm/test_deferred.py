"""Values that the host reads later: they are the same, and nothing waits for them."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Unit
from shardlab.codecs.wire import PayloadError
from shardlab.comm import deferred
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.deferred import Deferred
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Account, Ledger
from shardlab.comm.native import Native
from tests.comm.wire import vector_of, wire
from tests.devices.late_device import late_cpu
from tests.ranks import on_ranks, run_ranks

N = 600
UNIT = Unit("layer")


def count(account: Account, found: float) -> None:
    account.not_finite += int(found)


def test_on_a_cpu_everything_is_read_at_once():
    values, account = Deferred[Account](), Account()
    values.value(account, torch.tensor(3), count)
    assert account.not_finite == 3
    seconds = []
    with values.seconds(account, torch.device("cpu"), lambda _, found: seconds.append(found)):
        pass
    assert len(seconds) == 1 and 0 <= seconds[0] < 10


def test_values_are_read_many_by_one_copy_and_nothing_waits(monkeypatch):
    monkeypatch.setattr(deferred, "EVERY", 10)
    values, account = Deferred[Account](), Account()
    with late_cpu() as device:
        for _ in range(25):
            values.value(account, torch.tensor(True), count)
        assert (account.not_finite, device.copies, device.waits) == (0, 2, 0)
        device.is_idle = True
        values.value(account, torch.tensor(False), count)
        assert (account.not_finite, device.copies, device.waits) == (20, 2, 0)
        device.is_idle = False
        values.settle()
        assert (account.not_finite, device.copies, device.waits) == (25, 3, 1)
        values.settle()
        assert (account.not_finite, device.copies) == (25, 3)


def test_counts_of_a_step_that_is_joined_follow_it():
    ledger = Ledger()
    with late_cpu():
        with ledger.apart(3):
            early = ledger.accounts["weights"]
            ledger.deferred.value(early, torch.tensor(2), count)
        ledger.join(3)
        assert ledger.sums()["weights"]["not_finite"] == 2


def test_an_error_comes_after_all_counts():
    def fail(account: Account, found: float) -> None:
        raise ValueError(f"read {found}")

    values, account = Deferred[Account](), Account()
    with late_cpu():
        values.value(account, torch.tensor(7), fail)
        values.value(account, torch.tensor(1), count)
        with pytest.raises(ValueError, match="read 7"):
            values.settle()
    assert account.not_finite == 1


@pytest.mark.parametrize("spec", [None, "int8:group=64", "qsgd", "topk:density=0.1", "none"])
def test_a_device_gets_the_same_bits_and_counts(spec):
    def worker(group):
        found = {}
        for late in (False, True):
            ledger = Ledger()
            if spec is None:
                ours = Native(group, ledger, "gradients")
            else:
                settings = CodecSettings(ErrorFeedback("int8"))
                ours = AllToAllCollective(group, ledger, "gradients", make_codec(spec), settings)
            results = []
            for step in range(3):
                vector, shard = vector_of(dist.get_rank(group), N, step), torch.empty(N // 2)
                if step == 1:
                    vector[5] = float("inf")
                if late:
                    with late_cpu() as device:
                        ours.reduce_scatter(shard, vector, 0.5, UNIT)
                        ours.all_reduce(vector, 0.5, Unit("other"))
                        assert device.waits == 0
                        sums = ledger.sums()
                else:
                    ours.reduce_scatter(shard, vector, 0.5, UNIT)
                    ours.all_reduce(vector, 0.5, Unit("other"))
                    sums = ledger.sums()
                results += [shard, vector]
            counts = {k: v for k, v in sums["gradients"].items() if not k.endswith("_s")}
            seconds = [v for k, v in sums["gradients"].items() if k.endswith("_s")]
            assert min(seconds) >= -1e-6
            found[late] = torch.cat(results), counts
        assert found[False][1] == found[True][1]
        if spec not in (None, "none"):  # the owner of the chunk sees it
            assert dist.get_rank(group) or found[True][1]["not_finite"] >= 1
        return {str(late): each[0] for late, each in found.items()}

    for rank in run_ranks(2, worker):
        assert torch.equal(rank["False"].view(torch.int32), rank["True"].view(torch.int32))


@on_ranks(1)
def test_a_checkpoint_is_saved_when_all_checks_are_read(group):
    handle = shardlab.attach(DistributedDataParallel(torch.nn.Linear(4, 4)), gradients="bf16")

    def fail(account: Account, found: float) -> None:
        raise PayloadError("damaged")

    with late_cpu():
        handle.ledger.deferred.value(Account(), torch.tensor(1), fail)
        with pytest.raises(PayloadError, match="damaged"):
            handle.state_dict()
        handle.state_dict()


def test_a_damaged_payload_is_named_when_it_is_read():
    def flipped(tensor):
        damaged = tensor.clone()
        damaged[tensor.numel() // 2] ^= 16
        return damaged

    def worker(group):
        ledger = Ledger()
        ours = AllToAllCollective(group, ledger, "gradients", make_codec("int8:group=64"))
        rank, shard = dist.get_rank(group), torch.empty(N // 2)
        ours.reduce_scatter(shard, vector_of(rank, N), 1.0, UNIT)  # the ranks agree
        with late_cpu(), wire() as sent:
            sent.change = flipped if rank == 1 else sent.change
            ours.reduce_scatter(shard, vector_of(rank, N), 1.0, UNIT)
            if rank == 1:
                ledger.deferred.settle()
                return
            with pytest.raises(PayloadError, match=r"payload of rank 1 .*'layer>0'.*damaged"):
                ledger.deferred.settle()
        return

    run_ranks(2, worker)
