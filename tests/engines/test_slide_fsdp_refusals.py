"""Models, outputs, batches and settings that `SlideFSDP` takes or refuses."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.core.errors import UserError
from tests.engines.sliding_factory import model_of, tokens_of
from tests.engines.small_engine import differing
from tests.ranks import on_ranks

Pair = namedtuple("Pair", ["loss", "logits"])
OUTPUTS = {
    "attribute": lambda loss, x: SimpleNamespace(loss=loss, logits=x),
    "mapping": lambda loss, x: {"loss": loss, "logits": x},
    "first of several": lambda loss, x: (loss, x),
    "named": Pair,
    "alone": lambda loss, x: loss,
    "a view": lambda loss, x: loss.view(1),
}
NO_LOSS = {
    "give it labels": lambda loss, x: {"logits": x},
    r"of shape \(2,\): one number": lambda loss, x: torch.stack([loss, loss]),
    "'float'.*: one number": lambda loss, x: (float(loss), x),
    "detached from the model": lambda loss, x: loss.detach(),
}
CONFIGS = {
    "learning_rate: input should be a finite": {"learning_rate": float("inf")},
    "weight_decay: input should be a finite": {"weight_decay": float("inf")},
    "seed: input should be a valid integer": {"seed": 1.5},
    r"gradients.codec: a codec is its name.*found 5": {"gradients": 5},
    "gradients.codec: a codec is its name, or a mapping with `name`": {
        "gradients": {"codec": "int8"}
    },
}
DEVICES = {
    "'x' is no device": "x",
    "5: this machine has|5 is no device": 5,
    "computes on 'cpu' or 'cuda'": "meta",
    "cuda:99: this machine has": "cuda:99",
}


class Own(nn.Module):
    """Blocks between two linear layers; `output` makes what it returns of loss and result."""

    def __init__(self, output=OUTPUTS["attribute"]):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.output = output

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h).relu()
        h = self.last(h)
        return self.output(h.square().mean(), h)


class Wrapped(nn.Module):
    """Somebody's own loss around a language model."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens):
        logits = self.inner(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def own_model(output=OUTPUTS["attribute"]):
    torch.manual_seed(0)
    return Own(output)


@on_ranks(1)
def test_a_loss_is_found_wherever_models_put_it() -> None:
    states = []
    for output in OUTPUTS.values():
        sliding = shardlab.SlideFSDP(own_model(output))
        for _ in range(2):
            found = sliding(x=torch.ones(2, 4))
        assert type(found) is type(output(torch.ones(()), None))
        states.append(sliding.state_dict())
    assert all(differing(state, states[0]) == [] for state in states)
    assert differing(states[0], own_model().state_dict()) != []


@on_ranks(1)
def test_an_output_without_a_loss_is_refused_and_nothing_has_happened() -> None:
    for message, output in NO_LOSS.items():
        sliding = shardlab.SlideFSDP(own_model(output))
        with pytest.raises(UserError, match=message):
            sliding(x=torch.ones(2, 4))
        assert differing(sliding.state_dict(), own_model().state_dict()) == []


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@on_ranks(1)
def test_a_model_inside_of_another_keeps_no_keys_and_values(checkpointing) -> None:
    inner = model_of("llama-untied")
    assert inner.config.use_cache
    config = shardlab.SlideConfig(activation_checkpointing=checkpointing)
    sliding = shardlab.SlideFSDP(Wrapped(inner), config)
    losses = [float(sliding(tokens=tokens_of(0, 0))) for _ in range(3)]
    assert losses[2] < losses[0] and inner.config.use_cache


@pytest.mark.parametrize("clip", [0.5, None])
@on_ranks(1)
def test_direct_call_of_the_model_is_refused_and_training_continues(clip) -> None:
    states = []
    for habit in (False, True):
        model = model_of("llama-untied")
        sliding = shardlab.SlideFSDP(model, shardlab.SlideConfig(clip=clip))
        for step in range(3):
            batch = {"input_ids": tokens_of(step, 0), "labels": tokens_of(step, 0)}
            sliding(batch)
            if habit:
                with pytest.raises(UserError, match=r"called outside of a step.*SlideFSDP"):
                    model(**batch)
                with torch.no_grad():
                    assert model(**batch).loss.isfinite()
        states.append(sliding.state_dict())
    assert differing(*states) == []


@on_ranks(1)
def test_unsupported_models_are_refused() -> None:
    compiled = own_model()
    compiled.compile()
    with torch.device("meta"):
        nowhere = own_model()
    refused = {
        "NoneType: give a torch.nn.Module": None,
        "Own: give a torch.nn.Module": Own,
        "is compiled": compiled,
        "is compiled, for parameters": torch.compile(own_model()),
        "has no parameters": nn.ModuleList([nn.ReLU()]),
        "Linear has no list of blocks": nn.Linear(2, 2),
        "distributed already": DistributedDataParallel(own_model()),
        "first.weight is on meta: load the model to the CPU": nowhere,
        "in float32": own_model().double(),
    }
    for message, model in refused.items():
        with pytest.raises(UserError, match=message):
            shardlab.SlideFSDP(model)
    with pytest.raises(UserError, match="config is a dict: give a SlideConfig"):
        shardlab.SlideFSDP(own_model(), {"clip": None})
    for message, device in DEVICES.items():
        with pytest.raises(UserError, match=message):
            shardlab.SlideFSDP(own_model(), shardlab.SlideConfig(device=device))


@pytest.mark.parametrize("message", CONFIGS)
def test_invalid_settings_are_refused(message):
    with pytest.raises(UserError, match=message):
        shardlab.SlideConfig(**CONFIGS[message])


@on_ranks(1)
def test_unnamed_batches_and_invalid_learning_rates_are_refused() -> None:
    sliding = shardlab.SlideFSDP(own_model())
    with pytest.raises(UserError, match="give a batch by name"):
        sliding(torch.ones(2, 4))
    for rate in (float("nan"), -1.0, "a"):
        sliding.learning_rate = rate
        with pytest.raises(UserError, match=r"SlideFSDP.learning_rate: input should be"):
            sliding(x=torch.ones(2, 4))
    assert differing(sliding.state_dict(), own_model().state_dict()) == []
