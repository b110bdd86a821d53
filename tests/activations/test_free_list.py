"""Parts of a range never overlap, and what is given back is one range again."""

from hypothesis import given
from hypothesis import strategies as st

from shardlab.activations.storage import FreeList


def allocate(space: FreeList, size: int) -> tuple[int, int]:
    start = space.allocate(size)
    if start is None:
        space.grow(space.lacking(size))
        start = space.allocate(size)
    assert start is not None
    return start, size


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=40), st.randoms())
def test_parts_never_overlap_and_become_one_again(requests, random):
    space, held = FreeList(), []
    for size, dropped in requests:
        held.append(allocate(space, size))
        taken = [place for start, length in held for place in range(start, start + length)]
        assert len(taken) == len({*taken}) and max(taken) < space.end
        for _ in range(min(dropped, len(held))):
            space.free(*held.pop(random.randrange(len(held))))
    for part in held:
        space.free(*part)
    if space.end:
        assert space.allocate(space.end) == 0


@given(st.lists(st.lists(st.integers(1, 9), min_size=1), min_size=1, max_size=5))
def test_the_range_is_as_large_as_the_largest_step(steps):
    space = FreeList()
    for sizes in steps:
        for part in [allocate(space, size) for size in sizes]:
            space.free(*part)
    assert space.end == max(map(sum, steps))
