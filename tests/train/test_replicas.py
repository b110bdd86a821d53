"""Checksums of the parameters that several ranks hold.

Tests of the engines check the replicas of each: `losses_of` of tests/engines/engine_cases.py.
"""

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.train.outputs import check_equal, checksum
from tests.ranks import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_sees_every_single_bit(dtype):
    vector = torch.randn(33).to(dtype)
    before = checksum(vector)
    assert checksum(vector.clone()) == before
    for index in (0, 17, 32):
        for bit in range(8 * vector.element_size()):
            turned = vector.clone()
            turned[index : index + 1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert checksum(turned) != before


@on_ranks(4)
def test_one_rank_of_four_is_named(group) -> None:
    rank = dist.get_rank(group)
    sums = {"weight [0]": 5, f"bias [{rank % 2}]": 7 + (rank == 3)}
    check_equal({"weight [0]": 5}, "now", group)
    for when, found in (("bias", sums), ("weight", {"weight [0]": int(rank == 2)})):
        with pytest.raises(UserError) as refused:
            check_equal(found, when, group)
        assert refused.match(rf"^{when} rank {3 if when == 'bias' else 2} holds other values")
