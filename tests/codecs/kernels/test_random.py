import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.kernels.random import places_reference, random_places
from tests.codecs.kernels.kernel_vectors import check_thread_counts

WORDS = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
CPU = torch.device("cpu")


@given(st.integers(1, 2**31 - 1), st.data(), WORDS)
def test_positions_are_ascending_different_and_in_range(n, data, key):
    k = data.draw(st.integers(1, min(n, 300)))
    places = random_places(n, k, key, CPU).long()
    assert len(places) == k and int(places[0]) >= 0 and int(places[-1]) < n
    assert bool((places.diff() > 0).all())


@given(st.integers(1, 5000), st.data(), WORDS)
def test_positions_match_reference(n, data, key):
    k = data.draw(st.integers(1, n))
    expected = torch.empty(k, dtype=torch.int32)
    places_reference(n, *key, expected)
    assert torch.equal(random_places(n, k, key, CPU), expected.sort().values)


def test_every_element_is_drawn_equally_often():
    n, k, draws = 23, 7, 10_000  # parts of three and of four elements
    counts = torch.zeros(n)
    for seed in range(draws):
        counts[random_places(n, k, (seed, 12345), CPU).long()] += 1
    expected = draws * k / n
    deviation = (expected * (1 - k / n)) ** 0.5
    assert ((counts - expected).abs() < 4.5 * deviation).all()


def test_positions_of_a_key_are_fixed():
    assert random_places(1000, 5, (1, 2), CPU).tolist() == [208, 333, 541, 684, 992]


def test_positions_do_not_depend_on_the_number_of_threads():
    check_thread_counts(lambda: [random_places(3_000_000, 300_000, (5, 6), CPU)])
