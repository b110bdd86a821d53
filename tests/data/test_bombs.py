import pytest

from tests.faults.bombs import BOMBS, complaint, explode

QUICK = ["brackets.json", "deep.xml", "record.json"]


@pytest.mark.parametrize("name", QUICK)
def test_a_bomb_takes_bounded_memory_and_ends_in_one_line(tmp_path, name):
    assert not complaint(explode(name, 20_000_000, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(BOMBS) - set(QUICK)))
def test_every_bomb_takes_bounded_memory_and_ends_in_one_line(tmp_path, name):
    assert not complaint(explode(name, 50_000_000, tmp_path))
