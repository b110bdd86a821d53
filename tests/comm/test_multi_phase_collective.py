"""`MultiPhaseCollective`: the contract of a collective over methods of several rounds."""

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
from tests.ranks import on_ranks, run_ranks

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


def counted():
    """Wraps torch's collectives so that they count the bytes each algorithm sends from a rank."""
    moved = {"bytes": 0.0, "calls": 0}

    def count(name, bytes_of):
        original = getattr(dist, name)

        def counting(*args, **kwargs):
            size = dist.get_world_size(kwargs["group"])
            moved["bytes"] += bytes_of(args, size)
            moved["calls"] += 1
            return original(*args, **kwargs)

        setattr(dist, name, counting)

    count("all_reduce", lambda args, size: 2 * args[0].nbytes * (size - 1) / size)
    count("all_to_all_single", lambda args, size: args[1].nbytes * (size - 1) / size)
    count("all_gather_single", lambda args, size: args[1].nbytes * (size - 1))
    return moved


def powersgd_numbers(blocks, rank, world_size):
    """How many numbers of a reduce-scatter are all-reduced, and how many scattered."""
    thin = [b for b in blocks if 2 * rank * (b.rows + b.columns) < b.rows * b.columns]
    factors = sum(rank * (b.rows + b.columns) for b in thin)
    exact = sum(-(-b.rows // world_size) * b.columns for b in blocks if b not in thin)
    return factors + 1, exact * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ledger_counts_the_bytes_of_every_round(world_size):
    n = sum(UNIT.chunk_sizes(world_size))
    share, w = (world_size - 1) / world_size, world_size
    reduced, rest = powersgd_numbers(UNIT.blocks, 2, world_size)
    k, buckets = max(1, round(0.1 * n)), round(0.05 * n)
    expected = {
        SPECS[0]: 4 * share * (2 * reduced + rest),
        SPECS[1]: 4 * share * w * (5 * buckets + 1 + k) + 4 * (w - 1) * (1 + -(-k // 2)),
        SPECS[2]: 4 * share * w * (4 * -(-n // 16) + 1),
    }

    def on_rank(group):
        found = {}
        for spec in SPECS:
            ours = collective(group, spec)
            vector = scattered(gradients(dist.get_rank(group), 0), world_size)
            ours.reduce_scatter(torch.empty(n), vector, 1.0, UNIT)
            ours.ledger.reset()
            original = (dist.all_reduce, dist.all_to_all_single, dist.all_gather_single)
            moved = counted()
            ours.reduce_scatter(torch.empty(n), vector, 1.0, UNIT)
            dist.all_reduce, dist.all_to_all_single, dist.all_gather_single = original
            account = ours.account
            assert account.collectives == moved["calls"] == account.extra_collectives + 1
            assert account.encode_s > 0
            assert (account.extra_collective_s > 0) == (account.extra_collectives > 0)
            figures = [account.bytes_wire, account.bytes_raw, moved["bytes"]]
            found[spec] = torch.tensor(figures, dtype=torch.float64)
        return found

    for found in run_ranks(world_size, on_rank):
        for spec in SPECS:
            wire, raw, moved = found[spec].tolist()
            assert wire == pytest.approx(expected[spec]) and wire == pytest.approx(moved)
            assert raw == pytest.approx(4 * share * world_size * n)


@every_method
@pytest.mark.parametrize("how", ["reduce_scatter", "all_reduce"])
def test_error_feedback_conserves_every_gradient(spec, how):
    steps, world_size = 5, 2

    def on_rank(group):
        ours, total, given = collective(group, spec, feedback=True), 0, 0
        for step in range(steps):
            matrices = gradients(dist.get_rank(group), step)
            if how == "reduce_scatter":
                vector = scattered(matrices, world_size)
                out = torch.empty(vector.numel() // world_size)
                ours.reduce_scatter(out, vector, 1.0, UNIT)
            else:
                vector = whole(matrices, world_size)
                out = vector.clone()
                ours.all_reduce(out, 1.0, UNIT)
            total, given = total + out, given + vector
        assert ours.feedback is not None
        return {"total": total, "given": given, "rest": ours.feedback.state_dict()["layer*"]}

    ranks = run_ranks(world_size, on_rank)
    if how == "all_reduce":
        assert torch.equal(ranks[0]["total"], ranks[1]["total"])
        total = ranks[0]["total"]
    else:
        total = torch.cat([found["total"] for found in ranks])
    rest = ranks[0]["rest"] + ranks[1]["rest"]
    torch.testing.assert_close(
        total + rest, ranks[0]["given"] + ranks[1]["given"], rtol=1e-3, atol=1e-3
    )
    assert rest.norm() > 0


@every_method
def test_a_run_goes_on_from_its_saved_state(spec):
    def on_rank(group):
        def steps_of(ours, first, last):
            outs = []
            for step in range(first, last):
                vector = scattered(gradients(dist.get_rank(group), step), 2)
                outs.append(torch.empty(vector.numel() // 2))
                ours.reduce_scatter(outs[-1], vector, 0.5, UNIT)
            return torch.cat(outs)

        ours = collective(group, spec, feedback=True)
        steps_of(ours, 0, 3)
        state = {name: value.clone() for name, value in ours.state_dict().items()}
        residuals = {name: value.clone() for name, value in ours.feedback.state_dict().items()}
        straight = steps_of(ours, 3, 6)
        other = collective(group, spec, feedback=True)
        other.load_state_dict(state)
        other.feedback.load_state_dict(residuals)
        return {"straight": straight, "resumed": steps_of(other, 3, 6)}

    for found in run_ranks(2, on_rank):
        assert torch.equal(found["straight"], found["resumed"])


@every_method
@on_ranks(2)
def test_residuals_outlive_a_step_with_a_number_that_is_not_finite(group, spec) -> None:
    ours = collective(group, spec, feedback=True)
    vectors = [scattered(gradients(dist.get_rank(group), step), 2) for step in range(3)]
    out = torch.empty(vectors[0].numel() // 2)
    for vector in vectors[:2]:
        ours.reduce_scatter(out, vector, 1.0, UNIT)
    before = ours.feedback.state_dict()["layer*"].clone()
    assert out.isfinite().all()
    vectors[2][0] = float("nan") if dist.get_rank(group) == 1 else 0.0
    ours.reduce_scatter(out, vectors[2], 1.0, UNIT)
    assert not out.isfinite().all()
    assert torch.equal(before, ours.feedback.state_dict()["layer*"]) and before.any()


def test_short_messages_travel_uncompressed_and_are_reported():
    def on_rank(group):
        ours = collective(group, SPECS[1], feedback=True, minimum_size=10**6)
        vector = scattered(gradients(dist.get_rank(group), 0), 2)
        out, all_of_it = torch.empty(vector.numel() // 2), vector.clone()
        ours.reduce_scatter(out, vector, 0.5, UNIT)
        ours.all_reduce(all_of_it, 0.5, UNIT)
        assert ours.account.uncompressed == {"fewer than 1000000 elements": 2}
        assert ours.account.elements == 0 and not ours.feedback.state_dict()
        return {"out": out, "all": all_of_it, "vector": vector}

    ranks = run_ranks(2, on_rank)
    exact = (ranks[0]["vector"] + ranks[1]["vector"]) / 2
    assert torch.equal(torch.cat([found["out"] for found in ranks]), exact)
    assert all(torch.equal(found["all"], exact) for found in ranks)


@on_ranks(2)
def test_the_ledger_says_how_much_a_sketch_sends(group) -> None:
    ours = collective(group, "sketch:density=0.1")
    vector = scattered(gradients(dist.get_rank(group), 0), 2)
    ours.reduce_scatter(torch.empty(vector.numel() // 2), vector, 1.0, UNIT)
    summary = ours.ledger.summary()["gradients"]
    assert summary["density"] == pytest.approx(0.1, rel=0.01)
    k = round(0.1 * vector.numel() / 2)
    assert summary["index_bytes"] == 4 * (1 + -(-k // 2))


@every_method
def test_the_audit_measures_the_error_of_the_method(spec):
    unit = Unit("odd", (Block("m", 47, 31), Block("b", 4, 1)))  # no multiple of the world size

    def on_rank(group):
        ours = collective(group, spec)
        vector = torch.cat([m.flatten() for m in gradients(dist.get_rank(group), 0, unit)])
        reduced = vector.clone()
        ours.all_reduce(reduced.clone(), 0.5, unit)
        with ours.ledger.auditing() as audit:
            ours.all_reduce(reduced, 0.5, unit)
        return {
            "vector": vector,
            "reduced": reduced,
            "sums": torch.tensor([audit.error_squared, audit.exact_squared]),
        }

    ranks = run_ranks(2, on_rank)
    exact = (ranks[0]["vector"] + ranks[1]["vector"]) / 2
    error = (ranks[0]["reduced"] - exact).square().sum()
    measured = ranks[0]["sums"] + ranks[1]["sums"]
    expected = torch.stack([error, exact.square().sum()])
    torch.testing.assert_close(measured, expected, rtol=1e-3, atol=1e-6)
    assert error > 0
