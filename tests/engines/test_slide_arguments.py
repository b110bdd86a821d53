"""`SlideFSDP` takes a strategy as it stands in params.yaml, and the numbers of AdamW."""

import pytest
import torch
from torch import nn

import shardlab
from shardlab.core.errors import UserError
from shardlab.strategy.document import parse_strategy
from tests.engines.sliding_factory import by_hand, labelled, model_of, slid, trained
from tests.ranks import on_ranks


@on_ranks(1)
def test_a_strategy_as_a_mapping_and_as_a_document_train_the_same_bits() -> None:
    settings = {"window": 3, "accumulation": 2, "gradients": {"codec": "int8"}}
    document = parse_strategy({"engine": "slide", **settings})
    losses = []
    for strategy in (settings, {"engine": "slide", **settings}, document, document.canonical()):
        sliding = shardlab.SlideFSDP(model_of("llama-untied"), strategy, learning_rate=1e-3)
        losses.append(trained(sliding, 0, 4))
    assert losses == [losses[0]] * 4


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"window": 1}, "SlideFSDP.window: input should be greater"),
        ({"weights": {"codec": "int8"}}, "use param_transfer: shard"),
        ({"activations": "disk"}, "set activation_checkpointing"),
        ({"accumulation": 0}, "SlideFSDP.accumulation: input should be greater"),
        ({"engine": "fsdp2"}, "engine is fsdp2, .* remove engine .*, or use fully_shard and shard"),
        ({"engine": "manual"}, "engine is manual, .* remove engine and the settings that slide la"),
        ({"sync": {"every": 8}}, "sync does not apply to engine 'slide': remove it"),
        ({"error_feedback": True}, "SlideFSDP.error_feedback: unknown key"),
        ({"betas": (0.9, 1.0)}, "SlideFSDP.betas.1: input should be less than 1"),
        ({"clip": 0.0}, "SlideFSDP.clip: input should be greater than 0"),
        ({"eps": float("inf")}, "SlideFSDP.eps: input should be a finite number"),
        ({"learning_rate": "a"}, "SlideFSDP.learning_rate is 'a': it must be 0 or more"),
        ({"learning_rate": -1.0}, "SlideFSDP.learning_rate is -1.0: it must be 0 or more"),
    ],
)
def test_a_strategy_or_a_number_without_meaning_is_refused_in_one_line(settings, reported):
    with pytest.raises(UserError, match=reported) as refusal:
        slid(model_of("gpt2-tied"), **settings)
    assert str(refusal.value).startswith("SlideFSDP") and "\n" not in str(refusal.value)


@on_ranks(1)
def test_a_codec_that_drops_what_it_does_not_send_warns() -> None:
    with pytest.warns(UserWarning, match="SlideFSDP: topk.* drops what it does not send"):
        slid(model_of("llama-untied"), gradients={"codec": "topk"})


@pytest.mark.parametrize("clip", [0.5, None])
@on_ranks(1)
def test_a_scheduler_sets_the_rate_of_the_steps_that_follow(clip) -> None:
    rates = [4e-3, 2e-3, 1e-3, 5e-4]
    expected = model_of("llama-untied")
    optimizer = torch.optim.AdamW(expected.parameters(), rates[0], (0.9, 0.95), weight_decay=0.1)
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        expected(**labelled(step, 0), use_cache=False).loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(expected.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    sliding = slid(model_of("llama-untied"), clip=clip)
    nothing = torch.optim.SGD([torch.zeros(1)], lr=rates[0])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(nothing, gamma=0.5)
    for step in range(len(rates)):
        sliding.learning_rate = scheduler.get_last_lr()[0]
        sliding(labelled(step, 0))
        nothing.step()
        scheduler.step()
    for name, value in sliding.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-4, atol=1e-5)


@on_ranks(1)
def test_a_step_keeps_the_rate_that_it_began_with() -> None:
    expected = by_hand(model_of("llama-untied"), [[labelled(0, 0), labelled(1, 0)]], 0.5)
    sliding = slid(model_of("llama-untied"), accumulation=2)
    sliding.learning_rate = rate = torch.tensor(1e-3)
    sliding(labelled(0, 0))
    rate.fill_(1.0)
    sliding(labelled(1, 0))
    for name, value in sliding.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
