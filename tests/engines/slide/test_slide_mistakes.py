"""What goes wrong in the user's part of a step, and what stays when an engine is gone."""

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import shardlab
from shardlab.core.errors import UserError
from shardlab.engines.slide import node
from tests.engines.slide.sliding import MODES, batch_of, differing, engine_of, states_of, train
from tests.engines.slide.test_slide_fsdp import model_of, tokens_of


def mapped_bytes():
    """Of memory that ranks share."""
    maps = Path("/proc/self/smaps").read_text()
    return sum(int(size) for size in re.findall(r"memfd:shardlab.*\nSize: +(\d+)", maps))


def test_a_call_that_fails_before_backward_can_be_made_again():
    def on_rank(group):
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
        return {}

    run_ranks(1, on_rank)


@pytest.mark.parametrize("sync", ["cpu_reduce", "gpu_reduce"])
def test_a_call_that_fails_while_others_gather_with_it_ends_all_ranks(sync):
    def on_rank(group):
        rank = dist.get_rank(group)
        config = shardlab.SlideConfig(param_transfer="shard", grad_sync=sync)
        sliding = shardlab.SlideFSDP(model_of("llama-untied"), config)
        tokens = tokens_of(0, rank)
        sliding(input_ids=tokens, labels=tokens)
        if rank == 1:
            with pytest.raises(IndexError):
                sliding(input_ids=tokens + 10_000, labels=tokens)
        error, told = (IndexError, "range") if rank == 1 else (RuntimeError, "rank 1: index out of")
        for _ in range(2):
            with pytest.raises(error, match=told):
                sliding(input_ids=tokens, labels=tokens)
        dist.barrier()  # whose process ends breaks connections
        return {}

    run_ranks(2, on_rank)


@pytest.mark.parametrize("clip", [0.5, None])
def test_who_is_interrupted_in_backward_does_not_go_on_with_half_a_step(clip):
    def on_rank(group):
        engine = engine_of(group, MODES["full-cpu_reduce"], clip=clip)
        train(engine, 1)

        def interrupt(*_):
            raise KeyboardInterrupt

        blocks = engine.module._model[0].transformer.h
        blocks[1].register_full_backward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(engine, 1)
        with pytest.raises(RuntimeError, match=r"broken off .KeyboardInterrupt.*begin anew"):
            engine.step([batch_of(0, 0)], 1e-3)
        with pytest.raises(RuntimeError, match="begin anew"):
            states_of(engine)
        return {}

    run_ranks(1, on_rank)


@pytest.mark.parametrize("engine_name", ["slide", "manual"])
def test_an_engine_that_is_gone_leaves_no_memory(engine_name):
    def on_rank(group):
        engine = engine_of(group, {"engine": engine_name})
        train(engine, 2)
        parts = [weakref.ref(engine), weakref.ref(engine.module)]
        parameter = weakref.ref(next(engine.module._model[0].parameters()))
        del engine
        gc.collect()
        assert [part() for part in parts] == [None, None] and parameter() is None
        return {"mapped": torch.tensor(mapped_bytes())}

    assert int(run_ranks(1, on_rank)[0]["mapped"]) == 0


def test_what_each_rank_takes_beside_has_to_fit_too(monkeypatch):
    def on_rank(group):
        engine = engine_of(group, MODES["full-cpu_reduce"])
        shared = engine._memory._mapped.size()
        del engine
        monkeypatch.setattr(node, "free_memory_bytes", lambda: shared + 1000)
        with pytest.raises(UserError, match="GiB are free and each takes its own, together"):
            engine_of(group, MODES["full-cpu_reduce"])
        return {}

    run_ranks(2, on_rank)


def test_a_step_that_is_left_out_says_so_and_a_model_slides_once():
    def on_rank(group):
        model = model_of("llama-untied")
        sliding = shardlab.SlideFSDP(model)
        tokens = tokens_of(0, 0)
        sliding(input_ids=tokens, labels=tokens)
        before, applied = sliding.state_dict(), [sliding.applied]
        model.lm_head.register_forward_hook(lambda module, inputs, output: output * torch.nan)
        sliding(input_ids=tokens, labels=tokens)
        assert [*applied, sliding.applied] == [True, False]
        assert differing(sliding.state_dict(), before) == []
        with pytest.raises(UserError, match="slides already"):
            shardlab.SlideFSDP(model)
        return {}

    run_ranks(1, on_rank)
