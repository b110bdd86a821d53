"""Predicted phases of PowerSGD are those of the method."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.base import MessageKey
from shardlab.codecs.powersgd import PowerSgd
from shardlab.codecs.unit import Block, Unit
from shardlab.forecast.machine import Line, PhasedLines
from shardlab.forecast.matrices import powersgd_phases
from shardlab.forecast.measured_phases import LocalCommunicator
from tests.forecast.test_phased import KNOWN, PHASED, shared_run
from tests.forecast.timing_factory import predicted

LINES = PhasedLines(Line(1e-4, 1e-9), (), matrix=2e-5)
CALIBRATED = {"reduce_scatter": LINES, "all_reduce": LINES}
sides = st.integers(1, 40)
shapes = st.lists(st.tuples(sides, sides), min_size=1, max_size=5)


@given(shapes, st.integers(1, 4), st.sampled_from([2, 3, 4]))
def test_messages_follow_from_shapes(matrices, rank, world_size):
    found = powersgd_phases(rank, matrices, world_size, CALIBRATED)
    unit = Unit("u", tuple(Block(str(n), *each) for n, each in enumerate(matrices)))
    method = PowerSgd(rank)
    ways = {"reduce_scatter": method.sum_scatter, "all_reduce": method.sum}
    for operation, reduce in ways.items():
        ranks = {"get_rank": lambda _: 0, "get_world_size": lambda _: world_size}
        with patch.multiple("torch.distributed", **ranks):
            wire = LocalCommunicator(None)
        chunks = world_size if operation == "reduce_scatter" else 1
        vector = torch.randn(chunks * sum(unit.chunk_sizes(chunks)))
        reduce(vector, unit, wire, MessageKey(0, 0, "u", 0))
        sent = [(way, size.at(1.0)) for way, size in found[operation].messages]
        assert sent == [each for each in wire.messages if each[1]]


def test_computation_is_that_of_the_factored_elements_and_of_every_matrix():
    factored, small = [(64, 64), (32, 128)], [(64, 1), (3, 3)]
    one, two, none = (
        powersgd_phases(2, each, 2, CALIBRATED)["all_reduce"].seconds.alpha
        for each in (factored[:1], [*factored, *small], small)
    )
    assert one == pytest.approx(1e-4 + 4096e-9)
    assert two == pytest.approx(1e-4 + 8192e-9 + 2e-5)
    assert none == 0.0


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_matrices_that_compress_better_take_less_time_on_a_slow_link(engine):
    """Units of as many elements, in other shapes."""
    codec = "powersgd:rank=2"
    model = KNOWN._replace(machine=PHASED._replace(phased={(codec, False): CALIBRATED}))
    run = shared_run(engine, "10mbit", codec)
    steps = []
    for rows in (8, 64):
        shaped = [
            each.model_copy(update={"matrices": [(rows, each.elements // rows)]})
            for each in run.units
        ]
        steps.append(predicted(model, run.model_copy(update={"units": shaped})))
    assert steps[1] < steps[0] < predicted(model, shaped_vector(run))


def shaped_vector(run):
    """The same with vectors, which are sent uncompressed."""
    flat = [each.model_copy(update={"matrices": [(each.elements, 1)]}) for each in run.units]
    return run.model_copy(update={"units": flat})
