"""`SlideFSDP` trains Hugging Face models as a plain loop does."""

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from tests.engines.sliding_factory import by_hand, labelled, model_of, slid, tokens_of, trained
from tests.ranks import on_ranks, run_ranks

FAMILIES = ["gpt2-tied", "llama-untied", "qwen2-tied", "mistral-untied"]
PLAIN = {"activation_checkpointing": "none"}


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_it_trains_as_a_loop_by_hand_does(group, family) -> None:
    steps = [[labelled(step, rank) for rank in range(2)] for step in range(4)]
    expected = by_hand(model_of(family), steps, clip=0.5)
    sliding = slid(model_of(family), **PLAIN)
    for step in range(4):
        output = sliding(labelled(step, dist.get_rank()))
        assert output.loss.isfinite() and sliding.gradient_norm > 0
    state = sliding.state_dict()
    if dist.get_rank() > 0:
        assert state == {}
        return
    assert state.keys() == expected.keys()
    model_of(family, seed=1).load_state_dict(state)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@on_ranks(2)
def test_resumed_run_matches_uninterrupted_run(tmp_path, dtype) -> None:
    config = {**PLAIN, "accumulation": 2, "param_dtype": dtype}
    straight = slid(model_of("gpt2-tied"), **config)
    trained(straight, 0, 4)
    straight.save(tmp_path / "saved")
    expected = trained(straight, 4, 8)
    other = slid(model_of("gpt2-tied", seed=5), **config)
    trained(other, 0, 2)
    other.load(tmp_path / "saved")
    assert trained(other, 4, 8) == expected


def test_any_number_of_ranks_loads(tmp_path):
    def save(group):
        sliding = slid(model_of("llama-untied"), **PLAIN)
        trained(sliding, 0, 2)
        sliding.save(tmp_path / "saved")
        return sliding.state_dict()

    def load(group):
        sliding = slid(model_of("llama-untied", seed=5), **PLAIN)
        sliding.load(tmp_path / "saved")
        return sliding.state_dict()

    saved, found = run_ranks(3, save)[0], run_ranks(2, load)[0]
    assert all(torch.equal(found[name], value) for name, value in saved.items())


@on_ranks(1)
def test_invalid_uses_are_refused(tmp_path) -> None:
    config = {**PLAIN, "accumulation": 2}
    with pytest.raises(UserError, match="float32"):
        slid(model_of("gpt2-tied").bfloat16(), **config)
    with pytest.raises(UserError, match="window"):
        slid(model_of("gpt2-tied"), window=1)
    sliding = slid(model_of("gpt2-tied"), **config)
    with pytest.raises(UserError, match="absent"):
        sliding.load(tmp_path / "absent")
    with torch.no_grad():
        assert sliding(input_ids=tokens_of(0, 0)).loss is None
    trained(sliding, 0, 1)
    with pytest.raises(UserError, match="in the middle of a step"):
        sliding.save(tmp_path / "saved")
