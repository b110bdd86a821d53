"""`MultiPhaseCollective`: the contract of a collective over multi-phase methods."""

import pytest
import torch

from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_method
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from shardlab.comm.multi_phase import MultiPhaseCollective
from tests.comm.phase_vectors import UNIT, gradients, scattered, whole
from tests.comm.wire import gathered
from tests.ranks import on_ranks

SPECS = [
    "powersgd:rank=2",
    "sketch:width=0.05,density=0.1",
    "gradiveq:slice=16,components=4,refresh=3",
]
every_method = pytest.mark.parametrize("spec", SPECS)


def collective(group, spec, feedback=False, minimum_size=0):
    method = make_method(spec)
    assert isinstance(method, MultiPhaseMethod)
    residuals = ErrorFeedback() if feedback else None
    settings = CodecSettings(residuals, minimum_size)
    return MultiPhaseCollective(group, Ledger(), "gradients", method, settings)


def reduce(ours, step, operation="reduce_scatter", scale=1.0):
    """The vector of this rank and the result of its reduction."""
    lay_out = scattered if operation == "reduce_scatter" else whole
    vector = lay_out(gradients(ours.rank, step), ours.world_size)
    if operation == "reduce_scatter":
        out = torch.empty(vector.numel() // ours.world_size)
        ours.reduce_scatter(out, vector, scale, UNIT)
    else:
        out = vector.clone()
        ours.all_reduce(out, scale, UNIT)
    return vector, out


@every_method
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
@on_ranks(2)
def test_error_feedback_conserves_gradients(group, spec, operation):
    ours, total, given = collective(group, spec, feedback=True), 0, 0
    for step in range(5):
        vector, out = reduce(ours, step, operation)
        total, given = total + out, given + vector
    totals = gathered(total, group)
    if operation == "all_reduce":
        assert torch.equal(*totals)
    else:
        total = torch.cat(totals)
    rest = sum(gathered(ours.feedback.state_dict()["layer*"], group))
    torch.testing.assert_close(total + rest, sum(gathered(given, group)), rtol=1e-3, atol=1e-3)
    assert rest.norm() > 0


@every_method
@on_ranks(2)
def test_resumed_run_matches_uninterrupted_run(group, spec):
    def steps_of(ours, first, last):
        return torch.cat([reduce(ours, step, scale=0.5)[1] for step in range(first, last)])

    ours, other = (collective(group, spec, feedback=True) for _ in range(2))
    steps_of(ours, 0, 3)
    other.load_state_dict({name: value.clone() for name, value in ours.state_dict().items()})
    other.feedback.load_state_dict(ours.feedback.state_dict())
    assert torch.equal(steps_of(ours, 3, 6), steps_of(other, 3, 6))
