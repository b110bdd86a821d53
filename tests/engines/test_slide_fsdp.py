"""`SlideFSDP` trains as a plain loop does, continues bit for bit, and refuses in one line."""

import gc
import resource
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import shardlab
from shardlab.core.errors import UserError
from tests.engines.sliding_factory import (
    INT4,
    by_hand,
    labelled,
    model_of,
    refused,
    slid,
    tokens_of,
    trained,
)
from tests.engines.small_engine import differing
from tests.families import VOCABULARY
from tests.ranks import on_ranks, run_ranks

FULL = {"activation_checkpointing": "full"}


def padded_batch(call, rank):
    """Texts of several lengths, padded at the right, of which some tokens have no label."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    lengths = torch.randint(3, 12 + 5 * (call % 3), (3, 1), generator=generator)
    tokens = torch.randint(VOCABULARY, (3, int(lengths.max())), generator=generator)
    mask = (torch.arange(tokens.shape[1]) < lengths).long()
    kept = mask.bool() & (torch.rand(tokens.shape, generator=generator) < 0.8)
    labels = tokens.where(kept, torch.tensor(-100))
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def steps(sliding, first, last):
    return [sliding(padded_batch(call, dist.get_rank())).loss.item() for call in range(first, last)]


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("gpt2-tied", "none"),
        ("llama-untied", "full"),
        ("qwen3-untied", "selective"),
        ("mistral-tied", "full"),
    ],
)
@on_ranks(2)
def test_masks_ignored_labels_and_lengths_train_as_by_hand(group, family, checkpointing) -> None:
    calls = [[padded_batch(call, rank) for rank in range(2)] for call in range(6)]
    both = [first + second for first, second in zip(calls[::2], calls[1::2], strict=True)]
    # as SlideFSDP, which turns the cache off
    batches = [[{**batch, "use_cache": False} for batch in step] for step in both]
    expected = by_hand(model_of(family), batches, 1.0, betas=(0.8, 0.9), eps=1e-6)
    config = {"accumulation": 2, "clip": 1.0, "betas": (0.8, 0.9), "eps": 1e-6}
    sliding = slid(model_of(family), activation_checkpointing=checkpointing, **config)
    steps(sliding, 0, 6)
    assert sliding.gradient_norm > 0 and sliding.applied
    state = sliding.state_dict()
    assert state.keys() == (expected.keys() if dist.get_rank() == 0 else set())
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("world_size", "clip", "family"), [(1, None, "llama-untied"), (2, 0.1, "qwen2-tied")]
)
@on_ranks()
def test_adapters_train_as_in_a_loop_by_hand(group, world_size, clip, family) -> None:
    batches = [[labelled(step, rank) for rank in range(world_size)] for step in range(4)]
    first, expected = adapted(family).state_dict(), by_hand(adapted(family), batches, clip)
    for transfer, again in (("full", "none"), ("shard", "full")):
        config = {"param_transfer": transfer, "activation_checkpointing": again}
        sliding = slid(adapted(family), clip=clip, **config)
        trained(sliding, 0, 4)
        state = sliding.state_dict()
        if dist.get_rank() > 0:
            continue
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        assert all("down" in n or "up" in n for n in differing(state, first))


def dropping(family, seed):
    """Other dropout on every rank."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).train()
    torch.manual_seed(seed + dist.get_rank())
    return model


# every codec, type, reduction, transfer, what is frozen, and dropout
@pytest.mark.parametrize(
    ("make", "config"),
    [
        (model_of, {"accumulation": 2, "param_dtype": "fp16"}),
        (model_of, {**INT4, **FULL, "param_dtype": "bf16"}),
        (adapted, {**INT4, "grad_sync": "gpu_reduce"}),
        (
            model_of,
            {
                **{"gradients": {"codec": {"name": "qsgd"}}, "weights": {"codec": "int8"}},
                **{"param_transfer": "shard", "grad_sync": "gpu_reduce", "accumulation": 2},
            },
        ),
        (adapted, {"param_dtype": "bf16", "moment_dtype": "bf16", "clip": None}),
        (dropping, FULL),
    ],
)
@on_ranks(2)
def test_resumed_run_matches_uninterrupted_run(tmp_path, make, config) -> None:
    straight, other = (slid(make("llama-untied", seed=seed), **config) for seed in (0, 5))
    trained(straight, 0, 2)
    straight.save(tmp_path / "saved")
    expected = trained(straight, 2, 6)
    trained(other, 0, 2)
    other.load(tmp_path / "saved")
    assert trained(other, 2, 6) == expected
    assert not differing(other.state_dict(), straight.state_dict())


def test_any_number_of_ranks_loads_and_residuals_are_merged(tmp_path):
    def save(group):
        sliding = slid(model_of("gpt2-tied"), **INT4)
        trained(sliding, 0, 3)
        sliding.save(tmp_path / "saved")
        return sliding.state_dict()

    def load(group):
        sliding = slid(model_of("gpt2-tied", seed=5), **INT4)
        sliding.load(tmp_path / "saved")
        state = sliding.state_dict()
        assert all(loss < 6 for loss in trained(sliding, 3, 6))
        return state

    saved, found = run_ranks(3, save)[0], run_ranks(2, load)[0]
    assert not differing(found, saved)


@on_ranks(2)
def test_damaged_missing_and_other_folders_are_refused_on_all_ranks(tmp_path) -> None:
    expected = trained(slid(model_of("gpt2-tied"), **INT4), 0, 4)
    sliding, folder = slid(model_of("gpt2-tied"), **INT4), tmp_path / "saved"
    found = trained(sliding, 0, 2)
    sliding.save(folder)
    partly = model_of("gpt2-tied")
    partly.transformer.ln_f.bias.requires_grad_(False)
    for other, reported in (
        (slid(model_of("llama-untied")), "embed_tokens.weight has the shape None"),
        (slid(partly), "other frozen parameters: frozen.transformer.ln_f.bias"),
        (
            slid(model_of("gpt2-tied"), gradients={"codec": "int4:group=32"}),
            "attach with error_feedback",
        ),
    ):
        assert reported in refused(partial(other.load, folder))
    seen = folder if dist.get_rank() == 0 else tmp_path / "elsewhere"
    assert "slide.json: no such file: name a folder" in refused(lambda: sliding.load(seen))
    if dist.get_rank() == 0:
        (folder / "rank-00001.safetensors").write_bytes(b"damaged")
    dist.barrier()
    assert "rank-00001.safetensors: damaged" in refused(lambda: sliding.load(folder))
    assert found + trained(sliding, 2, 4) == expected


@on_ranks(2)
def test_full_disk_on_one_rank_is_raised_on_all_and_keeps_the_old_folder(tmp_path) -> None:
    sliding = slid(model_of("gpt2-tied"), **INT4)
    trained(sliding, 0, 1)
    sliding.save(tmp_path / "saved")
    expected = trained(sliding, 1, 3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    line = refused(lambda: sliding.save(tmp_path / "saved"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "saved: cannot be written" in line and "(rank 1: " in line
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    sliding.load(tmp_path / "saved")
    assert trained(sliding, 1, 3) == expected


@on_ranks(1)
def test_save_replaces_what_it_has_written_and_nothing_else(tmp_path) -> None:
    sliding = slid(model_of("gpt2-tied"))
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("precious")
    for name in ("model", "file"):
        with pytest.raises(UserError, match="save has not written it: name another folder"):
            sliding.save(tmp_path / name)
    for _ in range(2):
        sliding.save(tmp_path / "saved")
    sliding.load(tmp_path / "saved")
    (tmp_path / "saved" / "notes").write_text("precious")
    with pytest.raises(UserError, match="it holds notes, which save has not written"):
        sliding.save(tmp_path / "saved")


@pytest.mark.parametrize(("family", "transfer"), [("gpt2-tied", "shard"), ("qwen2-tied", "full")])
@on_ranks(2)
def test_evaluation_and_text_between_steps_see_the_last_update_and_change_nothing(
    family, transfer
) -> None:
    prompt = torch.arange(5).repeat(2, 1)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    config = {"clip": None, "param_transfer": transfer, **FULL}
    straight = steps(slid(model_of(family), **config), 0, 2)
    model = model_of(family)
    sliding, found = slid(model, **config), []
    for step in range(2):
        found += steps(sliding, step, step + 1)
        mask = torch.ones_like(prompt)
        text = model.eval().generate(prompt, attention_mask=mask, **options)
        with torch.no_grad():
            loss = sliding(padded_batch(9, 0)).loss
        state, plain = sliding.state_dict(), model_of(family).eval()
        if dist.get_rank() == 0:
            plain.load_state_dict(state)
            assert torch.equal(text, plain.generate(prompt, attention_mask=mask, **options))
            with torch.no_grad():
                torch.testing.assert_close(loss, plain(**padded_batch(9, 0)).loss)
        model.train()
    assert found == straight


@pytest.mark.parametrize(("transfer", "clip"), [("full", None), ("shard", 0.5)])
@on_ranks(2)
def test_evaluation_within_a_step_changes_nothing_and_no_step_counts_it(transfer, clip) -> None:
    found = []
    for evaluates in (False, True):
        config = {"accumulation": 2, "clip": clip, "param_transfer": transfer, **FULL}
        sliding = slid(model_of("qwen2-tied"), **config)
        reported = []
        for call in range(4):
            if evaluates:
                with torch.no_grad():
                    sliding(padded_batch(9, 0))
            losses, summary = steps(sliding, call, call + 1), sliding.ledger.summary()
            reported.append((losses, [each["bytes_wire"] for each in summary.values()]))
        found.append(reported)
    assert found[0] == found[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("ours", [{}, FULL, {"overrides": [{"layers": 1, **FULL}]}])
@on_ranks(1)
def test_a_model_that_checkpoints_its_layers_trains_the_same_bits(ours, reentrant) -> None:
    for make in (model_of, adapted):
        straight, model = steps(slid(make("llama-untied")), 0, 2), make("llama-untied")
        with warnings.catch_warnings():  # by the name that most scripts use
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert steps(slid(model, **ours), 0, 2) == straight


@on_ranks(1)
def test_a_call_that_fails_before_backward_can_be_made_again() -> None:
    states = []
    for fails in (False, True):
        sliding = shardlab.SlideFSDP(model_of("llama-untied"), FULL)
        for step in range(3):
            tokens = tokens_of(step, 0)
            if fails and step == 1:
                with pytest.raises(UserError, match="give it labels"):
                    sliding(input_ids=tokens)
                with pytest.raises(IndexError):
                    sliding(input_ids=tokens + 10_000, labels=tokens)
            sliding(input_ids=tokens, labels=tokens)
        states.append(sliding.state_dict())
    assert differing(*states) == []


@on_ranks(1)
def test_uses_of_the_model_itself_are_refused_and_training_continues(tmp_path) -> None:
    states, weights = [], model_of("llama-untied").state_dict()
    for habit in (False, True):
        model = model_of("llama-untied")
        sliding = slid(model)
        trained(sliding, 0, 1)
        if habit:
            with pytest.raises(UserError, match=r"called outside of a step.*SlideFSDP"):
                model(**labelled(0, 0))
            with torch.no_grad():
                assert model(**labelled(0, 0)).loss.isfinite()
            with pytest.raises(UserError, match=r"take SlideFSDP\.state_dict"):
                model.model.layers[2].state_dict()
            with pytest.raises(UserError, match=r"continue with SlideFSDP\.load"):
                model.load_state_dict(weights)
            with pytest.raises(UserError, match="in another SlideFSDP already"):
                shardlab.SlideFSDP(model)
        trained(sliding, 1, 2)
        states.append(sliding.state_dict())
    assert differing(*states) == []
    model.save_pretrained(tmp_path / "model", state_dict=states[0])
    del sliding
    gc.collect()
    with torch.no_grad(), pytest.raises(UserError, match="keep SlideFSDP as long as the model"):
        model(input_ids=tokens_of(0, 0))


@on_ranks(1)
def test_backward_of_a_loss_that_has_had_it_is_refused_and_training_continues() -> None:
    states = []
    for habit in (False, True):
        sliding = slid(model_of("llama-untied"))
        for step in range(2):
            loss = sliding(labelled(step, 0)).loss
            if habit:
                for again in (loss, loss / 2):
                    with pytest.raises(UserError, match=r"has run backward.*remove") as refusal:
                        again.backward()
                    assert "\n" not in str(refusal.value)
        states.append(sliding.state_dict())
    assert differing(*states) == []


@on_ranks(1)
def test_calls_that_mean_nothing_are_refused(tmp_path) -> None:
    sliding = slid(model_of("llama-untied"), accumulation=2)
    with pytest.raises(UserError, match="give a batch by name"):
        sliding(labelled(0, 0)["input_ids"])
    for rate in (float("nan"), -1.0):
        sliding.learning_rate = rate
        with pytest.raises(UserError, match=r"SlideFSDP.learning_rate is .*: it must be 0 or more"):
            sliding(labelled(0, 0))
    sliding.learning_rate = 1e-3
    sliding(labelled(0, 0))
    with pytest.raises(UserError, match="in the middle of a step"):
        sliding.save(tmp_path / "saved")
