"""`shardlab.SlidingCheckpoint` in training scripts, on models that checkpoint themselves."""

import gc
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

import shardlab
from shardlab.core.errors import UserError
from tests.commands import said_after
from tests.descriptors import opened
from tests.disks import limit_files
from tests.families import VOCABULARY, config_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.fresh_ranks

FAMILIES = ["gpt2-tied", "llama-untied", "qwen3-tied"]


def model_of(family, **checkpointing):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family)).train()
    with warnings.catch_warnings():  # by the name that most scripts use
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(checkpointing or None)
    return model


def train(model, sliding, rank=0):
    """Losses of three steps of two backward passes each, and the weights after them."""
    torch.manual_seed(rank)  # of dropout, too
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(3):
        for _ in range(2):
            tokens = torch.randint(VOCABULARY, (4, 32))
            with sliding:
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": torch.tensor(losses), **weights}


def assert_same(found, expected):
    assert [n for n, tensor in expected.items() if not torch.equal(found[n], tensor)] == []


def left(sliding) -> int:
    """Bytes that the file of the store has room for."""
    return sliding._store._storage.space.end


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_weights_are_the_same_bits(family, tmp_path):
    sliding = shardlab.SlidingCheckpoint.on_disk(tmp_path, "cpu")
    assert_same(train(model_of(family), sliding), train(model_of(family), nullcontext()))
    assert left(sliding) >= 2 * 4 * 32 * 64 * 4, "the inputs of two of the three layers"


@on_ranks(2)
def test_ddp_trains_the_same_bits(group, tmp_path) -> None:
    rank = group.rank()

    def trained(sliding):
        return train(DistributedDataParallel(model_of("gpt2-tied")), sliding, rank)

    sliding = shardlab.SlidingCheckpoint.on_disk(tmp_path, "cpu")
    assert_same(trained(sliding), trained(nullcontext()))
    assert left(sliding) > 0


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": True}, None])
def test_a_model_whose_inputs_cannot_leave_is_refused(tmp_path, checkpointing):
    model = model_of("gpt2-tied", **checkpointing or {})
    if checkpointing is None:
        model.activation_checkpointing_disable()
    sliding = shardlab.SlidingCheckpoint.on_disk(tmp_path, "cpu")
    with pytest.raises(UserError, match=r"nothing was checkpointed.*use_reentrant=False"):
        train(model, sliding)


def test_inputs_on_another_device_are_refused(tmp_path):
    sliding = shardlab.SlidingCheckpoint.on_disk(tmp_path, "meta")
    with pytest.raises(UserError, match="on cpu, but the store is for meta"):
        train(model_of("gpt2-tied"), sliding)


def test_memory_is_refused_where_it_is_that_of_the_device():
    with pytest.raises(UserError, match="in host memory already: use on_disk"):
        shardlab.SlidingCheckpoint.in_memory("cpu")


def test_disk_space_is_freed_with_the_last_reference(tmp_path):
    sliding = shardlab.SlidingCheckpoint.on_disk(tmp_path, "cpu")
    train(model_of("gpt2-tied"), sliding)
    assert len(opened(str(tmp_path))) == 1
    del sliding
    gc.collect()
    assert opened(str(tmp_path)) == []


@pytest.mark.parametrize(
    "when_full, reported", [("error", "more bytes do not fit"), ("memory", "True")]
)
def test_a_full_disk_is_an_error_or_memory_takes_the_rest(tmp_path, when_full, reported):
    def fill():
        sliding = shardlab.SlidingCheckpoint.on_disk(tmp_path, "cpu", when_full=when_full)
        layers = [nn.Linear(1024, 1024) for _ in range(16)]
        hidden = torch.ones(64, 1024).requires_grad_() * 1
        try:
            with sliding:
                for layer in layers:
                    hidden = checkpoint(layer, hidden, use_reentrant=False)
            hidden.sum().backward()
            print(all(layer.weight.grad is not None for layer in layers))
        except UserError as error:
            print(error)

    said = said_after(partial(limit_files, 1 << 20), fill, tmp_path)
    assert reported in said.splitlines()[-1]
    spilled = when_full == "memory"
    assert said.count("host memory takes the rest") == spilled and said.count("\n") == 1 + spilled
