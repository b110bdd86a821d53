"""Asynchronous gathers of `fsdp2`: asked for, or needed on a CPU."""

from typing import Any

import pytest

from shardlab.core.errors import UserError
from shardlab.engines.fsdp2 import gathers_asynchronously
from shardlab.strategy.document import parse_strategy


@pytest.mark.parametrize(
    ("settings", "on_cpu", "on_gpu"),
    [
        ({}, False, False),
        # a GPU gathers ahead on another stream than that of asynchronous gathers
        ({"prefetch": 1}, True, False),
        ({"prefetch_backward": 1}, True, False),
        ({"prefetch": 1, "async_unshard": True}, True, True),
        ({"async_unshard": True}, True, True),
        ({"async_unshard": False}, False, False),
    ],
)
def test_prefetch_needs_asynchronous_gathers_on_a_cpu_alone(
    settings: dict[str, Any], on_cpu: bool, on_gpu: bool
) -> None:
    strategy = parse_strategy({"engine": "fsdp2", **settings}).canonical()
    assert gathers_asynchronously(strategy, streams=False) is on_cpu
    assert gathers_asynchronously(strategy, streams=True) is on_gpu


def test_prefetch_without_effect_is_refused() -> None:
    document = {"engine": "fsdp2", "prefetch": 1, "async_unshard": False}
    strategy = parse_strategy(document).canonical()
    with pytest.raises(UserError, match="prefetch does nothing on a CPU"):
        gathers_asynchronously(strategy, streams=False)
    assert not gathers_asynchronously(strategy, streams=True)
