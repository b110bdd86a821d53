from hypothesis import given
from hypothesis import strategies as st

from shardlab.data.tokenize.shards import is_validation

TITLES = st.text(st.characters(exclude_categories=["Cs"]))
SHARES = st.floats(0.001, 0.999)


@given(TITLES, SHARES, SHARES)
def test_a_larger_share_keeps_the_documents_of_a_smaller(title, one, other):
    small, large = sorted([one, other])
    assert is_validation(title, large) or not is_validation(title, small)


def test_the_share_is_met_and_stays_what_it_was():
    chosen = [i for i in range(20000) if is_validation(f"title {i}", 0.02)]
    assert 340 < len(chosen) < 460  # three standard deviations
    assert chosen[:5] == [21, 130, 145, 195, 339]
