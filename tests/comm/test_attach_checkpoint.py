"""States of attached models in torch.distributed.checkpoint, on real ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardlab.core.errors import UserError
from tests.comm.test_attach_steps import are_equal, attached, train
from tests.ranks import run_ranks


def load(folder, rank):
    """As docs/how-to/your-own-model.md says."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    own = {name: each for name, each in saved.items() if name.startswith(f"rank{rank}.")}
    state = {n: torch.empty(each.size, dtype=each.properties.dtype) for n, each in own.items()}
    dcp.load(state, checkpoint_id=folder)
    return state


@pytest.mark.parametrize("name", ["fsdp2", "ddp"])
def test_a_distributed_checkpoint_keeps_the_residuals_of_each_rank(name, tmp_path):
    def on_rank(group):
        rank = dist.get_rank(group)
        model, handle, sgd = attached(group, name)
        train(model, sgd, group, range(3))
        expected = handle.state_dict()
        dcp.save(expected, checkpoint_id=tmp_path)
        _, fresh, _ = attached(group, name)
        fresh.load_state_dict(load(tmp_path, rank))
        found = fresh.state_dict()
        assert found.keys() == expected.keys() and are_equal(expected, found)
        return {k.partition(".")[2]: v for k, v in found.items()}

    first, second = run_ranks(2, on_rank)
    residuals = [key for key in first if ".residual." in key and "layout:" not in key]
    # otherwise a mixture would go unnoticed
    assert any(not torch.equal(first[key], second[key]) for key in residuals)


def test_states_that_mix_ranks_or_lack_residuals_are_refused(tmp_path):
    def on_rank(group):
        rank = dist.get_rank(group)
        model, handle, sgd = attached(group, "fsdp2")
        train(model, sgd, group, range(2))
        dcp.save(handle.state_dict(), checkpoint_id=tmp_path)
        _, fresh, _ = attached(group, "fsdp2")
        with pytest.raises(UserError, match=rf"nothing of rank {rank}: .*merge_states"):
            fresh.load_state_dict(load(tmp_path, 1 - rank))
        state = fresh.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        with pytest.raises(UserError, match=r"holds 0 of \d+ residuals: .*metadata"):
            fresh.load_state_dict(state)
        return {}

    run_ranks(2, on_rank)
