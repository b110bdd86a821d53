"""GPU of each rank, the backend that all of them allow, and errors before training."""

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.core.gpus import RankGpu, backend_of, gpu_index, refuse_shared, usable_gpu

ONE, TWO = RankGpu("GPU-a", True), RankGpu("GPU-b", True)


@pytest.mark.parametrize(
    ("visible", "forked", "expected"),
    [
        (8, True, 7),  # all GPUs of the machine
        (8, False, 7),
        (1, False, 0),  # the GPU of this rank alone
        (1, True, None),  # shared by the ranks
        (0, False, None),
    ],
)
def test_a_rank_takes_the_gpu_of_its_local_rank(monkeypatch, visible, forked, expected):
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert gpu_index(visible, forked=forked) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cuda_says_becomes_one_line_with_the_fix():
    with pytest.raises(UserError, match=r"^GPU 7: cannot be used \(.*\): see what nvidia") as error:
        usable_gpu(7)
    assert "\n" not in str(error.value)


def test_every_rank_with_its_own_gpu_uses_nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert backend_of([ONE, TWO]) == "cpu:gloo,cuda:nccl"
    assert backend_of([ONE, ONE]) == backend_of([ONE, None]) == "gloo"
    with pytest.raises(UserError, match="unequal GPUs: some have no bf16"):
        backend_of([ONE, TWO._replace(bf16=False)])
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UserError, match="has no NCCL, which GPUs need: install"):
        backend_of([ONE])


def test_ranks_that_share_a_gpu_are_refused_where_they_would_use_nccl():
    refuse_shared([ONE, TWO], "wait")
    with pytest.raises(UserError, match=r"^ranks 0, 2 share the GPU GPU-a, .*, or wait$"):
        refuse_shared([ONE, TWO, ONE], "wait")
