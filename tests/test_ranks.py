"""Ranks that are kept run the next function only if the one before left them as they were."""

import os

import torch

from tests.ranks import run_ranks


def test_kept_ranks_are_reused_until_a_function_changes_them() -> None:
    def look(group):
        return {"pid": torch.tensor(os.getpid()), "one": torch.ones(1)}

    def change(group):
        torch.set_default_dtype(torch.float64)
        return look(group)

    run_ranks(1, change)  # ranks of earlier tests may soon have been used often enough to end
    first, again, changed, after = (run_ranks(1, each)[0] for each in (look, look, change, look))
    assert first["pid"] == again["pid"] == changed["pid"] != after["pid"]
    assert changed["one"].dtype is torch.float64 and after["one"].dtype is torch.float32
