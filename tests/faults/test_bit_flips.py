import pytest

from tests.faults.bit_flips import main


@pytest.mark.long
def test_every_damaged_file_is_named():
    assert main(faults=64, seed=1)
