"""Results of a collective do not depend on its surroundings, such as autocast."""

import pytest
import torch

from shardlab.codecs.registry import make_method
from shardlab.comm.codec_collective import Route
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from shardlab.comm.routes import make_collective
from tests.codecs.codec_examples import METHODS
from tests.codecs.vectors import default_dtype
from tests.comm.phase_vectors import LAYOUTS, UNIT, gradients
from tests.ranks import on_ranks

BF16 = torch.bfloat16


@pytest.mark.parametrize("spec", ["none", "int8", "topk:density=0.1", *METHODS])
@pytest.mark.parametrize("how", list(LAYOUTS))
@on_ranks(2)
def test_results_depend_neither_on_autocast_nor_on_the_default_dtype(group, spec, how):
    steps = [LAYOUTS[how](gradients(group.rank(), step), 2) for step in range(3)]

    def reduced():
        route = Route(make_method(spec), feedback=None if spec == "none" else ErrorFeedback())
        ours, results = make_collective(group, Ledger(), "gradients", route), []
        for vector in steps:
            out = vector.clone() if how == "sum" else vector.new_empty(vector.numel() // 2)
            if how == "sum":
                ours.all_reduce(out, 0.5, UNIT)
            else:
                ours.reduce_scatter(out, vector, 0.5, UNIT)
            results.append(out)
        return torch.cat(results)

    expected = reduced()
    with torch.autocast("cpu", BF16):
        assert torch.equal(reduced(), expected)
    for dtype in (BF16, torch.float64):
        with default_dtype(dtype):
            assert torch.equal(reduced(), expected)
