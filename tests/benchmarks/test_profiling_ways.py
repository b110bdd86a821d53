"""The parts that the benchmark of profiling disables exist."""

import torch

from benchmarks import profiling
from tests.ranks import run_ranks


def test_step_is_timed_in_every_way():
    def on_rank(group):
        times = profiling._repetitions(profiling.CASES["fsdp2-int8"], "tiny", 1, group)
        return {way: torch.tensor(seconds) for way, seconds in times.items()}

    for found in run_ranks(2, on_rank):
        assert found.keys() == {"plain", "profiled", "without the ledger", "without labels"}
        assert all(len(seconds) == 1 for seconds in found.values())
