"""Errors in the user's part of a step, and what a deleted engine frees."""

import gc
import os
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlab
from shardlab.core.errors import UserError
from shardlab.engines.slide import shared_memory
from tests.commands import TORCHRUN, Command, forked
from tests.engines.small_engine import MODES, batch_of, differing, engine_of, states_of, train
from tests.engines.sliding_factory import model_of, tokens_of
from tests.ranks import on_ranks


def mapped_bytes():
    """Of memory that ranks share."""
    maps = Path("/proc/self/smaps").read_text()
    return sum(int(size) for size in re.findall(r"memfd:shardlab.*\nSize: +(\d+)", maps))


@on_ranks(1)
def test_a_call_that_fails_before_backward_can_be_made_again() -> None:
    def trained(fails):
        sliding = shardlab.SlideFSDP(model_of("llama-untied"))
        for step in range(3):
            tokens = tokens_of(step, 0)
            if fails and step == 1:
                with pytest.raises(UserError, match="give it labels"):
                    sliding(input_ids=tokens)
                with pytest.raises(IndexError):
                    sliding(input_ids=tokens + 10_000, labels=tokens)
            sliding(input_ids=tokens, labels=tokens)
        return sliding.state_dict()

    assert differing(trained(fails=True), trained(fails=False)) == []


@pytest.mark.parametrize("sync", ["cpu_reduce", "gpu_reduce"])
@pytest.mark.fresh_ranks
@on_ranks(2)
def test_a_call_that_fails_while_others_gather_with_it_ends_all_ranks(group, sync) -> None:
    rank = dist.get_rank(group)
    config = shardlab.SlideConfig(param_transfer="shard", grad_sync=sync)
    sliding = shardlab.SlideFSDP(model_of("llama-untied"), config)
    tokens = tokens_of(0, rank)
    sliding(input_ids=tokens, labels=tokens)
    if rank == 1:
        with pytest.raises(IndexError):
            sliding(input_ids=tokens + 10_000, labels=tokens)
    error, reported = (IndexError, "range") if rank == 1 else (RuntimeError, "rank 1: index out of")
    for _ in range(2):
        with pytest.raises(error, match=reported):
            sliding(input_ids=tokens, labels=tokens)
    dist.barrier()  # whose process ends breaks connections


@pytest.mark.parametrize("clip", [0.5, None])
@on_ranks(1)
def test_step_interrupted_in_backward_cannot_be_continued(group, clip) -> None:
    engine = engine_of(group, MODES["full-cpu_reduce"], clip=clip)
    train(engine, 1)

    def interrupt(*_):
        raise KeyboardInterrupt

    blocks = engine.module._model[0].transformer.h
    blocks[1].register_full_backward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(engine, 1)
    with pytest.raises(RuntimeError, match=r"broken off .KeyboardInterrupt.*from a checkpoint"):
        engine.step([batch_of(0, 0)], 1e-3)
    with pytest.raises(RuntimeError, match="continue from a checkpoint"):
        states_of(engine)


@pytest.mark.fresh_ranks
@pytest.mark.parametrize("engine_name", ["slide", "manual"])
@on_ranks(1)
def test_deleted_engine_frees_its_memory(group, engine_name) -> None:
    engine = engine_of(group, {"engine": engine_name})
    train(engine, 2)
    parts = [weakref.ref(engine), weakref.ref(engine.module)]
    parameter = weakref.ref(next(engine.module._model[0].parameters()))
    del engine
    gc.collect()
    assert [part() for part in parts] == [None, None] and parameter() is None
    assert mapped_bytes() == 0


@on_ranks(2)
def test_private_memory_of_ranks_must_fit_too(group, monkeypatch) -> None:
    engine = engine_of(group, MODES["full-cpu_reduce"])
    shared = engine._memory._mapped.size()
    del engine
    monkeypatch.setattr(shared_memory, "free_memory_bytes", lambda: shared + 1000)
    with pytest.raises(UserError, match="GiB are free and each takes its own, together"):
        engine_of(group, MODES["full-cpu_reduce"])


@on_ranks(1)
def test_skipped_step_is_reported_and_a_model_cannot_be_wrapped_twice() -> None:
    model = model_of("llama-untied")
    sliding = shardlab.SlideFSDP(model)
    tokens = tokens_of(0, 0)
    sliding(input_ids=tokens, labels=tokens)
    before, applied = sliding.state_dict(), [sliding.applied]
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * torch.nan)
    sliding(input_ids=tokens, labels=tokens)
    assert [*applied, sliding.applied] == [True, False]
    assert differing(sliding.state_dict(), before) == []
    with pytest.raises(UserError, match="in another SlideFSDP already"):
        shardlab.SlideFSDP(model)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
import shardlab

torch.manual_seed(0)
sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
sliding = shardlab.SlideFSDP(GPT2LMHeadModel(GPT2Config(**sizes)))
tokens = torch.arange(10)[None] + dist.get_rank()
sliding(input_ids=tokens, labels=tokens)
sliding.synchronize()
torch.save(dist.get_world_size(), f"{sys.argv[1]}/{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


def test_process_group_of_a_single_rank_can_be_replaced(tmp_path):
    def replace():
        for made in (False, True):
            assert dist.is_initialized() == made
            sliding, tokens = shardlab.SlideFSDP(model_of("llama-untied")), tokens_of(0, 0)
            sliding(input_ids=tokens, labels=tokens)
            sliding.synchronize()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    command = Command(tmp_path / "command", replace)
    assert command.wait() == 0, command.said()


class Blocks(nn.Module):
    """Linear layers of which some have the weight of the first one, and perhaps nothing else."""

    def __init__(self, shared=(), ends=True):
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.outward = (
            nn.Linear(8, 8) if ends else nn.Identity() for _ in ("in", "out")
        )
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        for module in map(self.get_submodule, shared):
            module.weight = self.blocks[0].weight

    def forward(self, x):
        hidden = self.inward(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return SimpleNamespace(loss=self.outward(hidden).square().mean())


@pytest.mark.parametrize("user", ["blocks.2", "outward"])
@on_ranks(1)
def test_a_parameter_that_two_units_use_is_refused(user) -> None:
    reported = f"weight belongs to blocks.0.*{user.replace('outward', 'root')} uses it"
    with pytest.raises(UserError, match=reported):
        shardlab.SlideFSDP(Blocks([user]))


# every pair of a transfer, a reduction and a change
@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "shard-cpu_reduce"),
        ({}, "full-gpu_reduce"),
        ({"clip": None}, "shard-cpu_reduce"),
        ({"clip": None}, "full-gpu_reduce"),
        ({"moments": "disk"}, "shard-gpu_reduce"),
        ({"moments": "disk"}, "full-gpu_reduce"),
    ],
)
@on_ranks(2)
def test_a_model_may_have_no_parameter_outside_of_its_blocks(changes, mode) -> None:
    states = []
    for document in (MODES["full-cpu_reduce"], MODES[mode]):
        own = {key: value for key, value in document.items() if key != "engine"}
        config = shardlab.SlideConfig(**own, **changes, activation_checkpointing="none")
        sliding = shardlab.SlideFSDP(Blocks(ends=False), config)
        for call in range(2):
            generator = torch.Generator().manual_seed(10 * call + dist.get_rank())
            sliding(x=torch.randn(4, 8, generator=generator))
        states.append(sliding.state_dict())
    assert differing(*states) == []
    before = Blocks(ends=False).state_dict()
    if dist.get_rank() == 0:
        assert len(differing(states[0], before)) == len(before)


@on_ranks(1)
def test_model_without_its_engine_is_refused() -> None:
    model = model_of("llama-untied")
    shardlab.SlideFSDP(model)
    gc.collect()
    with torch.no_grad(), pytest.raises(UserError, match="keep SlideFSDP as long as the model"):
        model(input_ids=tokens_of(0, 0))


@pytest.mark.fresh_ranks
@on_ranks(2)
def test_forked_process_exits_cleanly_and_training_continues(group) -> None:
    engine = engine_of(group, MODES["full-cpu_reduce"])
    train(engine, 2)
    child = os.fork()
    if child == 0:
        del engine
        gc.collect()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    train(engine, 1, first=2)


def test_ranks_that_a_launcher_started_train_together(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--standalone", "--nproc-per-node=2"]
    agent = forked(tmp_path / "agent", [*TORCHRUN, *options, str(script), str(tmp_path)])
    assert agent.wait() == 0, agent.said()
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert states[0] == states[1] == 2
