"""Messages of multi-phase methods in a calibration."""

import pytest
import torch

from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_method
from shardlab.comm.codec_collective import Route
from shardlab.comm.ledger import Ledger
from shardlab.comm.multi_phase import MultiPhaseCollective
from shardlab.predict.codec_costs import phased_times, unit_of
from shardlab.results.calibration_record import PhasedCost, wire_bytes
from tests.ranks import on_ranks

SPECS = [
    "int8-shared:group=8",
    "sketch:rows=4,width=0.01,density=0.3",
    "gradiveq:slice=16,components=4,refresh=3",
    "powersgd:rank=2",
]


@pytest.mark.parametrize(("spec", "world_size"), [*zip(SPECS, (2, 3, 2, 3), strict=True)])
@on_ranks()
def test_calibrated_messages_are_those_of_real_ranks(group, monkeypatch, spec, world_size):
    """Number and bytes, in an ordinary step."""
    n = 48 * 30
    unit = unit_of(n)
    monkeypatch.setattr("shardlab.predict.codec_costs.ELEMENTS", [n])
    costs = [PhasedCost(**each) for each in phased_times([(spec, True)], 1, group)]
    assert [each.operation for each in costs] == ["reduce_scatter", "all_reduce"]
    for cost in costs:
        method, ledger = make_method(spec), Ledger()
        assert isinstance(method, MultiPhaseMethod)
        ours = MultiPhaseCollective(group, ledger, "gradients", Route(method))
        for _ in range(2):
            ledger.reset()
            vector = torch.randn(n)
            if cost.operation == "all_reduce":
                ours.all_reduce(vector, 1.0, unit)
            else:
                ours.reduce_scatter(vector[: n // world_size].clone(), vector, 1.0, unit)
        account = ledger.accounts["gradients"]
        # on gloo chunks are summed by an exchange
        ways = [
            "exchange" if m.operation == "reduce_scatter" else m.operation for m in cost.messages
        ]
        sent = [
            wire_bytes(way, message.nbytes, world_size)
            for way, message in zip(ways, cost.messages, strict=True)
        ]
        assert account.bytes_wire == pytest.approx(sum(sent))
        assert account.collectives == len(cost.messages) > 0
        assert len(cost.seconds) == 1 and cost.seconds[0] > 0
