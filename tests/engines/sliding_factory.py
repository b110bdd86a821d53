"""Models, samples and plain loops for the tests of `SlideFSDP`."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import shardlab
from shardlab.comm.object_collectives import gather_values
from shardlab.core.errors import UserError
from tests.families import config_of

INT4 = {"gradients": {"codec": "int4:group=32", "error_feedback": True}}
ADAMW = {"learning_rate", "betas", "eps", "weight_decay", "clip", "seed", "device"}


def model_of(family, seed=0):
    """A Hugging Face model without dropout."""
    torch.manual_seed(seed)
    off = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    changes = dict.fromkeys(off, 0.0) if family.startswith("gpt2") else {"attention_dropout": 0.0}
    return AutoModelForCausalLM.from_config(config_of(family, **changes)).train()


def slid(model, **settings):
    """A model in `SlideFSDP`, by settings of a strategy and numbers of AdamW."""
    numbers = {"learning_rate": 1e-3, "clip": 0.5}
    numbers |= {key: value for key, value in settings.items() if key in ADAMW}
    strategy = {key: value for key, value in settings.items() if key not in ADAMW}
    return shardlab.SlideFSDP(model, strategy, **numbers)


def tokens_of(step, rank):
    return torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))


def labelled(step, rank):
    tokens = tokens_of(step, rank)
    return {"input_ids": tokens, "labels": tokens}


def trained(sliding, first, last):
    """The losses of this rank's calls."""
    rank = dist.get_rank()
    return [sliding(labelled(call, rank)).loss.item() for call in range(first, last)]


def by_hand(model, steps, clip, rate=1e-3, betas=(0.9, 0.95), eps=1e-8):
    """The weights after a plain loop over steps, each with the samples of all ranks and calls."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, rate, betas, eps, weight_decay=0.1, fused=True)
    for batches in steps:
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()
        for parameter in parameters:
            if parameter.grad is None:  # not used in this step
                parameter.grad = torch.zeros_like(parameter)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def refused(call):
    """The error's only line, which is the same on all ranks."""
    with pytest.raises(UserError) as reported:
        call()
    [line] = {*gather_values(str(reported.value), dist.group.WORLD)}
    assert "\n" not in line
    return line
