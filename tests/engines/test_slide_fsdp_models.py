"""`SlideFSDP` with Hugging Face models as scripts use them: masks, evaluation, text."""

import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.core.errors import UserError
from tests.engines.sliding_factory import by_hand, model_of, slid
from tests.families import VOCABULARY
from tests.ranks import on_ranks

FAMILIES = ["gpt2-tied", "llama-untied", "qwen2-tied", "qwen3-untied", "mistral-tied"]


def padded_batch(call, rank):
    """Texts of several lengths, padded at the right, of which some tokens have no label."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    lengths = torch.randint(3, 12 + 5 * (call % 3), (3, 1), generator=generator)
    tokens = torch.randint(VOCABULARY, (3, int(lengths.max())), generator=generator)
    mask = (torch.arange(tokens.shape[1]) < lengths).long()
    labelled = mask.bool() & (torch.rand(tokens.shape, generator=generator) < 0.8)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.where(labelled, torch.tensor(-100)),
    }


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        *((family, "full") for family in FAMILIES),
        ("gpt2-tied", "none"),
        ("qwen3-untied", "selective"),
    ],
)
@on_ranks(2)
def test_masks_ignored_labels_and_lengths_train_as_by_hand(group, family, checkpointing) -> None:
    calls = [[padded_batch(call, rank) for rank in range(2)] for call in range(6)]
    steps = [first + second for first, second in zip(calls[::2], calls[1::2], strict=True)]
    # as SlideFSDP, which turns the cache off
    batches = [[{**batch, "use_cache": False} for batch in step] for step in steps]
    expected = by_hand(model_of(family), batches, 1.0, betas=(0.8, 0.9), eps=1e-6)
    config = {"accumulation": 2, "clip": 1.0, "betas": (0.8, 0.9), "eps": 1e-6}
    sliding = slid(model_of(family), activation_checkpointing=checkpointing, **config)
    for call in range(6):
        sliding(padded_batch(call, dist.get_rank()))
    state = sliding.state_dict()
    assert state.keys() == (expected.keys() if dist.get_rank() == 0 else set())
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


def steps(sliding, first, last):
    return [sliding(padded_batch(call, dist.get_rank())).loss.item() for call in range(first, last)]


@pytest.mark.parametrize(
    ("family", "transfer"),
    [("gpt2-tied", "shard"), ("qwen2-tied", "full"), ("llama-untied", "full")],
)
@on_ranks(2)
def test_evaluation_and_text_between_steps_see_the_last_update_and_change_nothing(
    family, transfer
) -> None:
    prompt = torch.arange(5).repeat(2, 1)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    config = {"clip": None, "param_transfer": transfer}
    straight = steps(slid(model_of(family), **config), 0, 2)
    model = model_of(family)
    sliding, found = slid(model, **config), []
    for step in range(2):
        found += steps(sliding, step, step + 1)
        model.eval()
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        with torch.no_grad():
            loss = sliding(padded_batch(9, 0)).loss
        state, plain = sliding.state_dict(), model_of(family).eval()
        if dist.get_rank() == 0:
            plain.load_state_dict(state)
            mask = torch.ones_like(prompt)
            assert torch.equal(text, plain.generate(prompt, attention_mask=mask, **options))
            with torch.no_grad():
                torch.testing.assert_close(loss, plain(**padded_batch(9, 0)).loss)
        model.train()
    assert found == straight


def moved(sliding):
    keys = "collectives", "bytes_raw", "bytes_wire"
    return [account[key] for account in sliding.ledger.summary().values() for key in keys]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("transfer", ["full", "shard"])
@on_ranks(2)
def test_evaluation_within_a_step_changes_nothing_and_no_step_counts_it(transfer, clip) -> None:
    found = []
    for evaluates in (False, True):
        config = {"accumulation": 2, "clip": clip, "param_transfer": transfer}
        sliding = slid(model_of("qwen2-tied"), **config)
        reported = []
        for call in range(4):
            if evaluates:
                with torch.no_grad():
                    sliding(padded_batch(9, 0))
            reported.append((steps(sliding, call, call + 1), moved(sliding)))
        found.append(reported)
    assert found[0] == found[1]
    assert found[0][-1][1][-1] > 0


@on_ranks(2)
def test_loaded_parameters_are_used_by_the_next_evaluation(tmp_path) -> None:
    saved, other = slid(model_of("llama-untied")), slid(model_of("llama-untied", seed=1))
    steps(saved, 0, 2)
    steps(other, 0, 1)
    saved.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    with torch.no_grad():
        assert other(padded_batch(9, 0)).loss == saved(padded_batch(9, 0)).loss


@pytest.mark.parametrize(
    ("theirs", "ours", "times"),
    [
        ({"use_reentrant": False}, "none", [2, 2, 2]),
        ({"use_reentrant": True}, "none", [2, 2, 2]),
        ({"use_reentrant": False}, "full", [2, 2, 2]),
        (None, "none", [2, 1, 2]),
        (None, "full", [2, 2, 2]),
    ],
)
@pytest.mark.parametrize("family", ["gpt2-tied", "llama-untied"])
@on_ranks(1)
def test_a_model_that_checkpoints_its_layers_trains_the_same_bits(
    family, theirs, ours, times
) -> None:
    """`times` that each layer computes in a step."""
    straight = steps(slid(model_of(family), activation_checkpointing="none"), 0, 2)
    model, computed = model_of(family), Counter()
    for number, block in enumerate(model.base_model.get_submodule(layers_of(model))):
        block.mlp.register_forward_pre_hook(lambda *_, n=number: computed.update([n]))
    with warnings.catch_warnings():  # by the name that most scripts use
        warnings.simplefilter("ignore", FutureWarning)
        if theirs is None:
            model.activation_checkpointing_enable(every_n_layers=2)
        else:
            model.gradient_checkpointing_enable(theirs)
    sliding = slid(model, activation_checkpointing=ours)
    assert steps(sliding, 0, 2) == straight
    assert [computed[number] for number in range(3)] == [2 * each for each in times]


class Pairs(nn.Module):
    """Not of Hugging Face: checkpoints two blocks at a time in its own forward method."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)
        )
        self.reentrant = reentrant

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.embedding(input_ids)
        for first in range(0, 6, 2):
            pair = nn.Sequential(*self.blocks[first : first + 2])
            if self.reentrant is None:
                hidden = pair(hidden)
            else:
                hidden = checkpoint(pair, hidden, use_reentrant=self.reentrant)
        logits = self.head(hidden)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@on_ranks(1)
def test_a_forward_method_that_checkpoints_blocks_is_computed_again_or_refused() -> None:
    straight = steps(slid(Pairs(None), activation_checkpointing="none"), 0, 4)
    for reentrant, ours in ((True, "none"), (True, "full"), (False, "full")):
        assert steps(slid(Pairs(reentrant), activation_checkpointing=ours), 0, 4) == straight
    with pytest.raises(UserError, match="set activation_checkpointing: full"):
        steps(slid(Pairs(False), activation_checkpointing="none"), 0, 1)


def layers_of(model):
    return "h" if model.config.model_type == "gpt2" else "layers"
