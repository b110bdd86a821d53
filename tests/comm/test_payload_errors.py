"""Damaged and unexpected payloads: the error names codec, unit and sending rank."""

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Unit
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.ledger import Ledger
from shardlab.launch import RunFailed, launch
from tests.comm.codec_factory import Positive
from tests.comm.wire import wire

N = 200
UNIT = Unit("layer")


def exchange(group, spec):
    return AllToAllCollective(group, Ledger(), "gradients", make_codec(spec))


def name_of(spec):
    return spec if isinstance(spec, str) else spec.name


def failing(worker, *patterns):
    with pytest.raises(RunFailed) as caught:
        launch(worker, 3, threads=1, timeout_s=20)
    for pattern in patterns:
        assert pattern in caught.value.detail


def flipped(tensor):
    """Changes one bit of a message (not of the agreement before it)."""
    if tensor.numel() <= 8:
        return tensor
    damaged = tensor.clone()
    damaged[tensor.numel() // 2] ^= 16
    return damaged


@pytest.mark.parametrize("spec", ["int8:group=64", "topk:density=0.5", Positive()], ids=name_of)
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_bit_that_flips_in_flight_is_an_error(spec, operation):
    def worker(group):
        rank, ours = dist.get_rank(group), exchange(group, spec)
        vector = torch.rand(3 * N)
        with wire() as sent:
            if rank == 1:
                sent.change = flipped
            if operation == "reduce_scatter":
                ours.reduce_scatter(torch.empty(N), vector, 1.0, UNIT)
            else:
                ours.all_gather(vector, vector[:N].clone(), UNIT)
        dist.barrier(group)

    name = make_codec(spec).name
    failing(worker, "PayloadError: payload of rank 1", name, "'layer", "damaged")


@pytest.mark.parametrize("other", ["int8:group=128", "bf16", "none", Positive()], ids=name_of)
def test_different_codecs_are_refused(other):
    def worker(group):
        ours = exchange(group, other if dist.get_rank(group) == 2 else "int8:group=64")
        ours.reduce_scatter(torch.empty(N), torch.rand(3 * N), 1.0, UNIT)

    failing(worker, "PayloadError: payload of rank ", "codec ", "'layer'", "differ in codec")


def test_different_models_and_steps_are_refused():
    def other_model(group):
        n = N + (dist.get_rank(group) == 2)
        exchange(group, "int8").reduce_scatter(torch.empty(n), torch.rand(3 * n), 1.0, UNIT)

    def other_step(group):
        ours = exchange(group, "int8")
        for step in range(3):
            if step == 2 and dist.get_rank(group) == 0:
                ours.load_state_dict({"layer": torch.tensor(7)})
            ours.reduce_scatter(torch.empty(N), torch.rand(3 * N), 1.0, UNIT)

    payload = "PayloadError: payload of rank ", "codec int8"
    failing(other_model, *payload, "differ in codec, options, model")
    failing(other_step, *payload, "is not the one that this rank expects")


def test_impossible_size_is_refused():
    def worker(group):
        ours = exchange(group, Positive())
        ours.all_gather(torch.empty(3 * N), torch.rand(N), UNIT)
        with wire() as sent:
            if dist.get_rank(group) == 1:
                size = torch.tensor([6 * N + 1]).view(torch.uint8)
                sent.change = lambda tensor: size if tensor.nbytes == 8 else tensor
            ours.all_gather(torch.empty(3 * N), torch.rand(N), UNIT)

    failing(worker, "PayloadError: rank 1 announces a payload of 1201 bytes", "codec positive")
