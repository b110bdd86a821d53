"""Training of adapters in a frozen model by `SlideFSDP`, against a plain loop."""

import os
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlab.core.errors import UserError
from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from tests.engines.small_engine import differing
from tests.engines.sliding_factory import by_hand, labelled, model_of, slid, trained
from tests.ranks import on_ranks

STEPS = 4


class Adapted(nn.Module):
    """Low-rank adaptation of a linear layer (Hu et al. 2021)."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 8, bias=False)
        self.up = nn.Linear(8, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(family="llama-untied", seed=0):
    model = model_of(family, seed).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


# every pair of settings
@pytest.mark.parametrize(
    ("world_size", "clip", "family"),
    [
        (1, None, "llama-untied"),
        (1, 0.1, "qwen2-tied"),
        (2, None, "qwen2-tied"),
        (2, 0.1, "llama-untied"),
    ],
)
@on_ranks()
def test_adapters_train_as_in_a_loop_by_hand(group, world_size, clip, family) -> None:
    steps = [[labelled(step, rank) for rank in range(world_size)] for step in range(STEPS)]
    first, expected = adapted(family).state_dict(), by_hand(adapted(family), steps, clip)
    for transfer, again in (("full", "none"), ("shard", "full")):
        config = {"param_transfer": transfer, "activation_checkpointing": again}
        sliding = slid(adapted(family), clip=clip, **config)
        trained(sliding, 0, STEPS)
        state = sliding.state_dict()
        if dist.get_rank() > 0:
            continue
        if clip is None:
            assert not differing(state, expected)
        else:  # whose norm is summed in float32
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        assert all("down" in n or "up" in n for n in differing(state, first))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("ours", ["none", "full"])
@on_ranks(1)
def test_layers_that_the_model_computes_again_train_the_same_bits(ours, reentrant) -> None:
    straight = slid(adapted(), activation_checkpointing="none", clip=None)
    losses, model = trained(straight, 0, STEPS), adapted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    sliding = slid(model, activation_checkpointing=ours, clip=None)
    assert trained(sliding, 0, STEPS) == losses
    assert not differing(sliding.state_dict(), straight.state_dict())


@on_ranks(2)
def test_evaluation_and_text_see_adapters_as_they_are_and_change_nothing() -> None:
    prompt = torch.arange(5).repeat(2, 1)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    straight, model = trained(slid(adapted(), clip=None), 0, STEPS), adapted()
    sliding, found = slid(model, clip=None), []
    for step in range(STEPS):
        found += trained(sliding, step, step + 1)
        state, plain = sliding.state_dict(), adapted().eval()
        mask = torch.ones_like(prompt)
        text = model.eval().generate(prompt, attention_mask=mask, **options)
        if dist.get_rank() == 0:
            plain.load_state_dict(state)
            assert torch.equal(text, plain.generate(prompt, attention_mask=mask, **options))
        model.train()
    assert found == straight


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"param_dtype": "bf16", "moments": "disk"},
        {"gradients": "int4:group=32", "error_feedback": True, "grad_sync": "gpu_reduce"},
        {"gradients": "int8", "weights": "int8", "param_transfer": "shard"},
    ],
)
@on_ranks(2)
def test_adapters_and_what_is_frozen_are_continued_bit_for_bit(tmp_path, config) -> None:
    with patch.dict(os.environ, {FOLDER_VARIABLE: str(tmp_path)}):
        straight, other = (slid(adapted(seed=seed), **config) for seed in (0, 5))
    trained(straight, 0, 2)
    straight.save(tmp_path / "saved")
    expected = trained(straight, 2, 4)
    trained(other, 0, 1)
    other.load(tmp_path / "saved")
    assert trained(other, 2, 4) == expected
    assert not differing(other.state_dict(), straight.state_dict())


@on_ranks(2)
def test_checkpoint_with_other_frozen_parameters_is_refused(tmp_path) -> None:
    name = "model.layers.0.self_attn.q_proj.up.weight"
    slid(adapted()).save(tmp_path / "adapters")
    more = adapted()
    more.get_parameter("model.norm.weight").requires_grad_(True)
    more.get_parameter(name).requires_grad_(False)
    sliding = slid(more)
    before = sliding.state_dict()
    with pytest.raises(UserError, match=f"{name} was trained|norm.weight was frozen") as reported:
        sliding.load(tmp_path / "adapters")
    message = str(reported.value)
    assert "\n" not in message and "start from what state_dict() gave" in message
    assert not differing(sliding.state_dict(), before)


@on_ranks(1)
def test_fully_frozen_model_is_refused() -> None:
    with pytest.raises(UserError, match="all parameters are frozen"):
        slid(model_of("llama-untied").requires_grad_(False))
