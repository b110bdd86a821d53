"""Predictions of strategies whose codec is a multi-phase method."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_method
from shardlab.codecs.unit import Unit
from shardlab.config.calibration_record import Message, PhasedCost
from shardlab.config.codec_options import SharedInt8Spec
from shardlab.config.link import bits_per_second
from shardlab.config.strategy import parse_strategy
from shardlab.core.errors import UserError
from shardlab.forecast.coding import Coding, codings
from shardlab.forecast.costs import Measured, OnCluster
from shardlab.forecast.extrapolation import extrapolate
from shardlab.forecast.integer_sums import integer_sums
from shardlab.forecast.machine import Line, PhasedLines, fit_machine
from shardlab.forecast.presets import preset
from shardlab.forecast.uncertainty import estimate
from shardlab.forecast.workload import case_of
from tests.forecast.timing_factory import MACHINE, MODEL, made_calibration, made_run, predicted

SHARED = "int8-shared:group=128"
LINES = {
    "reduce_scatter": PhasedLines(
        Line(3e-5, 2e-9), (("all_reduce", Line(0.0, 1 / 32)), ("reduce_scatter", Line(0.0, 1.0)))
    ),
    "all_reduce": PhasedLines(
        Line(2e-5, 1e-9), (("all_reduce", Line(0.0, 1 / 32)), ("all_reduce", Line(0.0, 1.0)))
    ),
}
PHASED = MACHINE._replace(phased={(SHARED, False): LINES})
KNOWN = MODEL._replace(machine=PHASED)
CODING = Coding(None, False, 1024, 4, phased=LINES)
elements = st.integers(1024, 1 << 22)
ranks = st.sampled_from([2, 4, 64])


def shared_run(engine, rate=None, codec=SHARED):
    strategy = parse_strategy({"engine": engine, "gradients": {"codec": codec}}).canonical()
    plain = made_run("x", engine, rate=rate)
    return plain.model_copy(update={"strategy": strategy.model_dump(mode="json")})


@given(elements, ranks, st.sampled_from(["10mbit", "1gbit", None]), st.sampled_from([*LINES]))
def test_a_method_takes_as_long_as_its_phases(n, world_size, rate, collective):
    """Computation, then a collective per message; on gloo an exchange sums chunks, on a cluster a
    reduce-scatter."""
    bits = None if rate is None else bits_per_second(rate)
    for costs, chunks in [
        (Measured(PHASED, world_size, world_size, bits), "exchange"),
        (OnCluster(preset("ethernet-10g"), world_size), "reduce_scatter"),
    ]:
        lines = LINES[collective]
        parts = lines.seconds.at(n)
        for way, size in lines.messages:
            sent = costs.transfer(chunks if way == "reduce_scatter" else way, size.at(n))
            parts += costs.alone([sent])
        whole = costs.alone(getattr(costs, collective)(n, CODING))
        assert whole == pytest.approx(parts)


def test_short_vectors_and_single_ranks_are_not_encoded():
    costs = Measured(PHASED, 2, 2)
    assert costs.all_reduce(1023, CODING) == (costs.transfer("all_reduce", 4 * 1023),)
    assert costs.reduce_scatter(1023, CODING) == (costs.transfer("exchange", 4 * 1023),)
    assert Measured(PHASED, 1, 2).all_reduce(4096, CODING) == ()


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "manual", "slide"])
def test_slower_links_and_slower_methods_take_longer(engine):
    steps = [
        predicted(KNOWN, shared_run(engine, rate)) for rate in ("10mbit", "100mbit", "1gbit", None)
    ]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
    slow = {k: v._replace(seconds=v.seconds.scaled(100)) for k, v in LINES.items()}
    slower = KNOWN._replace(machine=PHASED._replace(phased={(SHARED, False): slow}))
    assert predicted(slower, shared_run(engine)) > steps[-1]
    # a quarter of the bytes of gradients; those of parameters stay
    assert steps[0] < 0.7 * predicted(MODEL, made_run("x", engine, rate="10mbit"))


def test_a_fit_recovers_computation_and_messages_and_their_uncertainty():
    sizes = [1 << power for power in (10, 13, 16, 20)]

    def made(noise):
        return [
            PhasedCost(
                codec=SHARED,
                error_feedback=False,
                operation=operation,
                elements=n,
                messages=[
                    Message(operation=way, nbytes=round(size.at(n))) for way, size in lines.messages
                ],
                seconds=[lines.seconds.at(n) * (1 + noise * (-1) ** index)] * 3,
            )
            for operation, lines in LINES.items()
            for index, n in enumerate(sizes)
        ]

    def fitted(costs):
        return fit_machine(made_calibration().model_copy(update={"phased": costs}))

    found = fitted(made(0.0)).phased[SHARED, False]
    for operation, lines in LINES.items():
        assert found[operation].seconds.at(1e5) == pytest.approx(lines.seconds.at(1e5), rel=1e-6)
        for (way, size), (expected, of) in zip(
            found[operation].messages, lines.messages, strict=True
        ):
            assert way == expected and size.at(1e6) == pytest.approx(of.at(1e6), rel=1e-6)
    case = case_of(shared_run("fsdp2"))
    sure, unsure = (
        estimate(MODEL._replace(machine=fitted(made(noise))), *case) for noise in (0.0, 0.2)
    )
    assert unsure.high - unsure.low > sure.high - sure.low
    # one size alone has these phases: others were sent as they are
    odd = [
        each if each.elements == max(sizes) else each.model_copy(update={"messages": []})
        for each in made(0.0)
    ]
    with pytest.raises(UserError, match=r"int8-shared.*fewer than 3 sizes with phases all_reduce"):
        fitted(odd)


def test_what_cannot_be_predicted_is_said():
    assert KNOWN.obstacle(case_of(shared_run("ddp")).strategy) is None
    assert MODEL.obstacle(case_of(shared_run("ddp")).strategy) == "its codec was not calibrated"
    powersgd = "powersgd:rank=2"
    matrices = shared_run("ddp", codec=powersgd)
    assert KNOWN.obstacle(case_of(matrices).strategy) == "its codec was not calibrated"
    both = KNOWN._replace(machine=PHASED._replace(phased={(powersgd, False): LINES}))
    with pytest.raises(UserError, match="timing lacks the shapes of matrices: repeat it"):
        predicted(both, matrices)
    inside, _ = codings(case_of(shared_run("ddp")).strategy, PHASED)
    assert inside.inside.phased == LINES


def test_shared_integers_are_compared_for_as_many_ranks_as_they_serve():
    most = SharedInt8Spec.most_ranks
    assert most == 127
    run = shared_run("fsdp2")
    points = extrapolate([run], KNOWN, ["dgx-h100"], (8, 64, most + 1, 512))
    assert [point.ranks for point in points] == [8, 64]
    found = integer_sums(PHASED, ["ethernet-10g"], (2, 64, 512))
    assert [each.ranks for each in found] == [2, 64]
    for each in found:
        assert each.shared_messages_ms < each.shared_ms
        assert each.exchanged_messages_ms < each.exchanged_ms
    assert integer_sums(MACHINE, ["ethernet-10g"], (2,)) == []


def test_as_many_ranks_as_a_codec_allows_can_sum_with_it():
    class Wire:
        rank = 0

        def __init__(self, world_size):
            self.world_size = world_size

        def largest(self, vector):
            pass

        sum = largest

    def summed(world_size):
        method = make_method(SHARED)
        key = MessageKey(0, 0, "u", 0)
        return method.sum(torch.ones(128), Unit("u"), Wire(world_size), key)

    assert summed(SharedInt8Spec.most_ranks).isfinite().all()
    with pytest.raises(UserError, match="do not fit into 8 bits"):
        summed(SharedInt8Spec.most_ranks + 1)
