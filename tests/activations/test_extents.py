"""Parts of a range never overlap, and what is given back is one range again."""

from hypothesis import given
from hypothesis import strategies as st

from shardlab.activations.extents import Extents


def take(extents: Extents, size: int) -> tuple[int, int]:
    start = extents.take(size)
    if start is None:
        extents.grow(extents.lacking(size))
        start = extents.take(size)
    assert start is not None
    return start, size


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=40), st.randoms())
def test_parts_never_overlap_and_become_one_again(requests, random):
    extents, held = Extents(), []
    for size, dropped in requests:
        held.append(take(extents, size))
        taken = [place for start, length in held for place in range(start, start + length)]
        assert len(taken) == len({*taken}) and max(taken) < extents.end
        for _ in range(min(dropped, len(held))):
            extents.give(*held.pop(random.randrange(len(held))))
    for part in held:
        extents.give(*part)
    if extents.end:
        assert extents.take(extents.end) == 0


@given(st.lists(st.lists(st.integers(1, 9), min_size=1), min_size=1, max_size=5))
def test_the_range_is_as_large_as_the_largest_step(steps):
    extents = Extents()
    for sizes in steps:
        for part in [take(extents, size) for size in sizes]:
            extents.give(*part)
    assert extents.end == max(map(sum, steps))
