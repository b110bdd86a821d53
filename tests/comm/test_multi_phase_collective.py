"""`MultiPhaseCollective`: the contract of a collective over multi-phase methods."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_method
from shardlab.codecs.unit import Block, Unit
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from shardlab.comm.multi_phase import MultiPhaseCollective
from tests.comm.phase_vectors import UNIT, gradients, scattered, whole
from tests.comm.wire import gathered, is_same_everywhere
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


@contextmanager
def counted():
    """Count the calls of torch's collectives and the bytes each algorithm sends from a rank."""
    moved = {"bytes": 0.0, "calls": 0}

    def counting(original, bytes_of):
        def call(*args, **kwargs):
            moved["bytes"] += bytes_of(args, dist.get_world_size(kwargs["group"]))
            moved["calls"] += 1
            return original(*args, **kwargs)

        return call

    rules = {
        "all_reduce": lambda args, size: 2 * args[0].nbytes * (size - 1) / size,
        "all_to_all_single": lambda args, size: args[1].nbytes * (size - 1) / size,
        "all_gather_single": lambda args, size: args[1].nbytes * (size - 1),
    }
    with ExitStack() as stack:
        for name, rule in rules.items():
            stack.enter_context(patch.object(dist, name, counting(getattr(dist, name), rule)))
        yield moved


def powersgd_numbers(blocks, rank, world_size):
    """Count the numbers of a reduce-scatter that are all-reduced, and those scattered."""
    thin = [b for b in blocks if 2 * rank * (b.rows + b.columns) < b.rows * b.columns]
    factors = sum(rank * (b.rows + b.columns) for b in thin)
    exact = sum(-(-b.rows // world_size) * b.columns for b in blocks if b not in thin)
    return factors + 1, exact * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_ledger_counts_the_bytes_of_every_phase(group, world_size):
    n = sum(UNIT.chunk_sizes(world_size))
    share, w = (world_size - 1) / world_size, world_size
    reduced, rest = powersgd_numbers(UNIT.blocks, 2, world_size)
    k, buckets = max(1, round(0.1 * n)), round(0.05 * n)
    expected = {
        SPECS[0]: 4 * share * (2 * reduced + rest),
        SPECS[1]: 4 * share * w * (5 * buckets + 1 + k) + 4 * (w - 1) * (1 + -(-k // 2)),
        SPECS[2]: 4 * share * w * (4 * -(-n // 16) + 1),
    }
    for spec in SPECS:
        ours = collective(group, spec)
        reduce(ours, 0)
        ours.ledger.reset()
        with counted() as moved:
            reduce(ours, 0)
        account = ours.account
        assert account.collectives == moved["calls"] == account.extra_collectives + 1
        assert account.encode_s > 0
        assert (account.extra_collective_s > 0) == (account.extra_collectives > 0)
        assert account.bytes_wire == pytest.approx(expected[spec]) == pytest.approx(moved["bytes"])
        assert account.bytes_raw == pytest.approx(4 * share * world_size * n)
        raw, (vector, _) = account.bytes_raw, reduce(ours, 1, "all_reduce")
        assert account.collectives - account.extra_collectives == 2
        assert account.bytes_raw == pytest.approx(raw + 2 * share * vector.nbytes)


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


@every_method
@on_ranks(2)
def test_residuals_do_not_change_in_a_step_that_is_not_finite(group, spec) -> None:
    ours = collective(group, spec, feedback=True)
    for step in range(2):
        _, out = reduce(ours, step)
    before = ours.feedback.state_dict()["layer*"].clone()
    assert out.isfinite().all()
    vector = scattered(gradients(ours.rank, 2), 2)
    vector[0] = float("nan") if ours.rank == 1 else 0.0
    ours.reduce_scatter(out, vector, 1.0, UNIT)
    assert not out.isfinite().all()
    assert torch.equal(before, ours.feedback.state_dict()["layer*"]) and before.any()


@on_ranks(2)
def test_short_messages_are_sent_uncompressed_and_reported(group):
    ours = collective(group, SPECS[1], feedback=True, minimum_size=10**6)
    vector, out = reduce(ours, 0, scale=0.5)
    ours.all_reduce(all_of_it := vector.clone(), 0.5, UNIT)
    exact = sum(gathered(vector, group)) / 2
    assert torch.equal(out, exact.chunk(2)[ours.rank]) and torch.equal(all_of_it, exact)
    assert ours.account.uncompressed == {"fewer than 1000000 elements": 2}
    assert ours.account.elements == 0 and not ours.feedback.state_dict()


@on_ranks(2)
def test_ledger_reports_the_density_of_a_sketch(group) -> None:
    ours = collective(group, "sketch:density=0.1")
    vector, _ = reduce(ours, 0)
    summary = ours.ledger.summary()["gradients"]
    assert summary["density"] == pytest.approx(0.1, rel=0.01)
    k = round(0.1 * vector.numel() / 2)
    assert summary["index_bytes"] == 4 * (1 + -(-k // 2))


@every_method
@on_ranks(2)
def test_audit_measures_the_error_of_the_method(group, spec):
    unit = Unit("odd", (Block("m", 47, 31), Block("b", 4, 1)))  # no multiple of the world size
    ours = collective(group, spec)
    vector = torch.cat([m.flatten() for m in gradients(ours.rank, 0, unit)])
    reduced = vector.clone()
    ours.all_reduce(reduced.clone(), 0.5, unit)
    with ours.ledger.auditing() as audit:
        ours.all_reduce(reduced, 0.5, unit)
    exact = sum(gathered(vector, group)) / 2
    error = float((reduced - exact).square().sum())
    measured = sum(gathered(torch.tensor([audit.error_squared, audit.exact_squared]), group))
    expected = torch.tensor([error, exact.square().sum()])
    torch.testing.assert_close(measured, expected, rtol=1e-3, atol=1e-6)
    assert error > 0 and is_same_everywhere(reduced, group)
