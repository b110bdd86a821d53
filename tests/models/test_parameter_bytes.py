"""Bytes of parameters, gradients and optimizer states of a model of many small units."""

import pytest

from shardlab.models.memory import Sizes, UnitShape, closed_form, host_memory
from shardlab.strategy.document import parse_strategy

FEEDBACK = {"codec": "int8", "error_feedback": True}
PARAMETERS = 1_000_000
UNITS = 1000


@pytest.mark.parametrize(
    "document, expected",
    [
        # 10**6 parameters on 4 ranks: 16 bytes each, whole or divided
        ({"engine": "ddp"}, 16.0),
        ({"engine": "fsdp1"}, 4.0),
        ({}, 4.0),
        ({"engine": "manual"}, 4.0),
        ({"reshard_after_forward": False}, 8.0),
        ({"engine": "fsdp1", "sharding": "no_shard"}, 16.0),
        # where fsdp2 still computes with a copy
        ({"sharding": "no_shard"}, 16.0 + 4.0),
        # gathered parameters, and gradients as autograd makes them and as they are reduced
        ({"wrap": "root"}, 4.0 + 4.0 + 8.0),
        ({"gradients": FEEDBACK}, 4.0 + 8.0),
        ({"gradients": {**FEEDBACK, "residual": "bf16"}}, 4.0 + 4.0),
        ({"gradients": {**FEEDBACK, "residual": "int8"}}, 4.0 + 2.031),
        ({"engine": "ddp", "gradients": FEEDBACK}, 16.0 + 8.0 + 2.0),
        # outer parameters and momentum; residuals, and both fragments on the way
        ({"engine": "ddp", "sync": {"every": 8}}, 16.0 + 8.0),
        ({"sharding": "hybrid_shard", "replicas": 2, "sync": {"every": 8}}, 8.0 + 4.0),
        (
            {"engine": "ddp", "sync": {"every": 8, "fragments": 2, "delay": 5, **FEEDBACK}},
            16.0 + 8.0 + 8.0 + 2.0 + 4.0,
        ),
        ({"engine": "ddp", "sync": {"every": 9, "state": "host"}}, 16.0 + 8.0),
        # states are divided; the gradients of every rank wait for the norm
        ({"engine": "slide"}, 3.0 + 4.0),
        ({"engine": "slide", "grad_sync": "gpu_reduce"}, 3.0 + 1.0),
        ({"engine": "slide", "moments": "disk"}, 1.0 + 4.0),
    ],
)
def test_bytes_of_parameters_match_hand_calculation(document, expected):
    full = parse_strategy(document).canonical()
    small = PARAMETERS // UNITS
    unit = UnitShape(small, small, kept=not full.reshard_after_forward, element_bytes=4)
    units = () if full.wrap in (None, "root") else (unit,) * UNITS
    sizes = Sizes(PARAMETERS, PARAMETERS, units=units, element_bytes=4, accumulation=1)
    found = [*closed_form(full, sizes, 4).values(), *host_memory(full, sizes, 4).values()]
    assert sum(found) / 1e6 == pytest.approx(expected, rel=0.02)


def test_the_state_of_exchanges_may_be_in_host_memory():
    sizes = Sizes(PARAMETERS, PARAMETERS, units=(), element_bytes=4)
    on_device, on_host = (
        parse_strategy({"engine": "ddp", "sync": {"every": 9, "state": state, **FEEDBACK}})
        for state in ("device", "host")
    )
    # what error feedback keeps stays where the gradients are
    outer = {"outer": 8 * PARAMETERS}
    assert closed_form(on_device, sizes, 4) == {**closed_form(on_host, sizes, 4), **outer}
    assert host_memory(on_host, sizes, 4) == outer and not host_memory(on_device, sizes, 4)
