"""What goes wrong on one rank while a slide engine is built."""

from tests.engines.slide.small_engine import MODES, DelayedCopies, engine_of
from tests.engines.slide.unwatched_ranks import outcomes


class UnpinnableCopies(DelayedCopies):
    """Host memory of one rank cannot be prepared for copies."""

    def pin(self, tensor):
        raise RuntimeError("cudaErrorMemoryAllocation\nof host memory")


def test_a_rank_that_cannot_take_its_model_is_told_to_all():
    def function(group):
        copies = UnpinnableCopies(0) if group.rank() == 1 else DelayedCopies(0)
        engine_of(group, MODES["full-cpu_reduce"], copies=copies)

    line, other = outcomes(2, function)
    assert line == other
    assert line == (
        "UserError: slide: host memory cannot take the model "
        "(rank 1: cudaErrorMemoryAllocation of host memory)"
    )
