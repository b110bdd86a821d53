"""Phases of collectives by hand: what is sent, encoded and decoded."""

import pytest

from shardlab.predict.coding import Coding
from shardlab.predict.costs import MeasuredCosts
from shardlab.predict.machine import CodecLines, Line
from tests.predict.timing_factory import MACHINE

N = 1 << 20
CODEC = CodecLines(encode=Line(0.0, 2e-9), decode=Line(0.0, 3e-9), payload=Line(0.0, 1.0))


@pytest.mark.parametrize(("ranks_per_node", "factor"), [(1, 1 + 66 / 1448), (None, 1.0)])
def test_a_link_that_the_kernel_emulates_counts_the_headers_of_frames(ranks_per_node, factor):
    """Of 14, 20 and 32 bytes for each 1,448; a link that ranks emulate counts payload alone."""
    costs = MeasuredCosts(MACHINE, 2, 2.0, 10**8, ranks_per_node=ranks_per_node)
    assert costs.transfer("exchange", N).nbytes == pytest.approx(factor * N / 2)


@pytest.mark.parametrize(("native", "payloads"), [(True, 1), (False, 4)])
def test_a_rank_decodes_what_it_receives(native, payloads):
    """The group's own collective sums payloads, so that one is left of four ranks'."""
    coding = Coding(CODEC, native, 0, 4)
    phases = MeasuredCosts(MACHINE, 4, 4.0).reduce_scatter(N, coding)
    assert phases[0].cpu == pytest.approx(4 * 2e-9 * N / 4)
    assert phases[-1].cpu == pytest.approx(payloads * 3e-9 * N / 4)


def test_ranks_exchange_the_sizes_of_payloads_that_vary():
    costs = MeasuredCosts(MACHINE, 4, 4.0, 10**8, ranks_per_node=None)
    fixed, varying = (
        costs.reduce_scatter(N, Coding(CODEC._replace(variable=variable), False, 0, 4))
        for variable in (False, True)
    )
    assert len(varying) == len(fixed) + 1
    assert varying[1] == costs.transfer("exchange", 8 * 4)
    assert (varying[0], *varying[2:]) == fixed
