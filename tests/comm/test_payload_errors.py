"""Damaged and unexpected payloads: the error names codec, unit and sending rank."""

import re

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Unit
from shardlab.codecs.wire import PayloadError
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.ledger import Ledger
from shardlab.train.launch import RunFailed, launch
from tests.comm.codec_factory import Positive
from tests.comm.wire import wire
from tests.ranks import on_ranks

N = 200
UNIT = Unit("layer")


def exchange(group, spec):
    return AllToAllCollective(group, Ledger(), "gradients", make_codec(spec))


def name_of(spec):
    return spec if isinstance(spec, str) else spec.name


def fails(call, *patterns):
    with pytest.raises(PayloadError) as caught:
        call()
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), str(caught.value)


def flipped(tensor):
    """Changes one bit of a message (not of the agreement before it)."""
    if tensor.numel() <= 8:
        return tensor
    damaged = tensor.clone()
    damaged[tensor.numel() // 2] ^= 16
    return damaged


@pytest.mark.parametrize("spec", ["int8:group=64", "topk:density=0.5", Positive()], ids=name_of)
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
@on_ranks(3)
def test_bit_that_flips_in_flight_is_an_error(group, spec, operation):
    rank, ours = dist.get_rank(group), exchange(group, spec)
    vector = torch.rand(3 * N)

    def send():
        if operation == "reduce_scatter":
            ours.reduce_scatter(torch.empty(N), vector, 1.0, UNIT)
        else:
            ours.all_gather(vector, vector[:N].clone(), UNIT)

    with wire() as sent:
        if rank == 1:
            sent.change = flipped
            send()
        else:
            fails(send, "^payload of rank 1", make_codec(spec).name, "'layer", "damaged")


@pytest.mark.parametrize("other", ["int8:group=128", "bf16", "none", Positive()], ids=name_of)
@on_ranks(3)
def test_different_codecs_are_refused(group, other):
    ours = exchange(group, other if dist.get_rank(group) == 2 else "int8:group=64")
    fails(
        lambda: ours.reduce_scatter(torch.empty(N), torch.rand(3 * N), 1.0, UNIT),
        *("^payload of rank ", "codec ", "'layer'", "differ in codec"),
    )


@on_ranks(3)
def test_different_models_and_steps_are_refused(group):
    def reduce(ours, n=N):
        ours.reduce_scatter(torch.empty(n), torch.rand(3 * n), 1.0, UNIT)

    other_model = N + (dist.get_rank(group) == 2)
    payload = "^payload of rank ", "codec int8"
    expected = "differ in codec, options, model"
    fails(lambda: reduce(exchange(group, "int8"), other_model), *payload, expected)
    ours = exchange(group, "int8")
    reduce(ours)
    reduce(ours)
    if dist.get_rank(group) == 0:
        ours.load_state_dict({"layer": torch.tensor(7)})
    fails(lambda: reduce(ours), *payload, "is not the one that this rank expects")


def test_impossible_size_ends_the_run():
    def worker(group):
        ours = exchange(group, Positive())
        ours.all_gather(torch.empty(3 * N), torch.rand(N), UNIT)
        with wire() as sent:
            if dist.get_rank(group) == 1:
                size = torch.tensor([6 * N + 1]).view(torch.uint8)
                sent.change = lambda tensor: size if tensor.nbytes == 8 else tensor
            ours.all_gather(torch.empty(3 * N), torch.rand(N), UNIT)

    with pytest.raises(RunFailed) as caught:
        launch(worker, 3, threads=1, timeout_s=20)
    detail = caught.value.detail
    assert "PayloadError: rank 1 announces a payload of 1201 bytes" in detail
    assert "codec positive" in detail
