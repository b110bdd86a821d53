"""`SlideFSDP` trains other people's models in other people's scripts."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import shardlab
from shardlab.core.errors import UserError
from tests.families import config_of
from tests.ranks import on_ranks, run_ranks

FAMILIES = ["gpt2-tied", "llama-untied", "qwen2-tied", "mistral-untied"]
CONFIG = {"learning_rate": 1e-3, "clip": 0.5, "activation_checkpointing": "none"}


def model_of(family, seed=0):
    torch.manual_seed(seed)
    changes = {} if family.startswith("gpt2") else {"attention_dropout": 0.0}
    if family.startswith("gpt2"):
        changes = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return AutoModelForCausalLM.from_config(config_of(family, **changes)).train()


def tokens_of(step, rank):
    return torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))


def by_hand(family, steps, world_size):
    """The same in a plain loop over the samples of all ranks."""
    model = model_of(family)
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    for step in range(steps):
        for rank in range(world_size):
            tokens = tokens_of(step, rank)
            (model(input_ids=tokens, labels=tokens).loss / world_size).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_as_a_loop_by_hand_does(family):
    expected = by_hand(family, 4, 2)

    def on_rank(group):
        sliding = shardlab.SlideFSDP(model_of(family), shardlab.SlideConfig(**CONFIG))
        for step in range(4):
            tokens = tokens_of(step, dist.get_rank())
            output = sliding({"input_ids": tokens, "labels": tokens})
            assert output.loss.isfinite() and sliding.gradient_norm > 0
        state = sliding.state_dict()
        if dist.get_rank() > 0:
            assert state == {}
            return {}
        assert state.keys() == expected.state_dict().keys()
        model_of(family, seed=1).load_state_dict(state)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-4)
        return {}

    run_ranks(2, on_rank)


def trained(sliding, first, last):
    rank = dist.get_rank()
    losses = []
    for call in range(first, last):
        tokens = tokens_of(call, rank)
        losses.append(float(sliding(input_ids=tokens, labels=tokens).loss))
    return losses


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_was_saved_is_continued_bit_for_bit(tmp_path, dtype):
    config = shardlab.SlideConfig(**CONFIG, accumulation=2, param_dtype=dtype)

    def on_rank(group):
        straight = shardlab.SlideFSDP(model_of("gpt2-tied"), config)
        trained(straight, 0, 4)
        straight.save(tmp_path / "saved")
        expected = trained(straight, 4, 10)
        other = shardlab.SlideFSDP(model_of("gpt2-tied", seed=5), config)
        trained(other, 0, 2)
        other.load(tmp_path / "saved")
        assert trained(other, 4, 10) == expected
        return {}

    run_ranks(2, on_rank)


def test_any_number_of_ranks_loads(tmp_path):
    config = shardlab.SlideConfig(**CONFIG)

    def save(group):
        sliding = shardlab.SlideFSDP(model_of("llama-untied"), config)
        trained(sliding, 0, 2)
        sliding.save(tmp_path / "saved")
        return sliding.state_dict()

    def load(group):
        sliding = shardlab.SlideFSDP(model_of("llama-untied", seed=5), config)
        sliding.load(tmp_path / "saved")
        return sliding.state_dict()

    saved, found = run_ranks(3, save)[0], run_ranks(2, load)[0]
    assert all(torch.equal(found[name], value) for name, value in saved.items())


@on_ranks(1)
def test_mistakes_are_told_in_one_line(tmp_path) -> None:
    config = shardlab.SlideConfig(**CONFIG, accumulation=2)
    with pytest.raises(UserError, match="float32"):
        shardlab.SlideFSDP(model_of("gpt2-tied").bfloat16(), config)
    with pytest.raises(UserError, match="window"):
        shardlab.SlideFSDP(model_of("gpt2-tied"), shardlab.SlideConfig(window=1))
    sliding = shardlab.SlideFSDP(model_of("gpt2-tied"), config)
    with pytest.raises(UserError, match="absent"):
        sliding.load(tmp_path / "absent")
    with torch.no_grad():
        assert sliding(input_ids=tokens_of(0, 0)).loss is None
    trained(sliding, 0, 1)
    with pytest.raises(UserError, match="in the middle of a step"):
        sliding.save(tmp_path / "saved")
