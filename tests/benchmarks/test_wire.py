"""The ledger knows every byte that a rank sends."""

import pytest

from benchmarks import wire
from shardlab.experiment.link import Link
from shardlab.transport.link_emulation import Links


@pytest.fixture
def links(permitted):
    with Links(2, Link(rate="1gbit")) as made:
        yield made


@pytest.mark.parametrize("name", ["none", "int8", "topk", "powersgd", "fsdp2", "manual"])
def test_ledger_and_interface_differ_by_headers_alone(links, name):
    found = wire._measured(wire.Case(2, "tiny", 2), name, links)
    payload = found["interface"] - 66 * found["frames"]
    assert found["ledger"] <= payload < 1.01 * found["ledger"]
    assert found["interface"] < 1.03 * found["ledger"]
