"""Activations that leave the device give the same bits, in scripts and in all engines."""

import os
import signal
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardlab
from shardlab.core.errors import UserError
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from tests.commands import Command, said_after, wait_for
from tests.disks import limit_files
from tests.drawn_weights import drawn_model
from tests.ranks import on_ranks
from tests.whole_parameters import whole_parameters

WIDTH, ROWS, LAYERS = 16, 128, 6
NBYTES = WIDTH * ROWS * 4
PLAIN = partial(checkpoint, use_reentrant=False)
AGAIN = {
    "full": PLAIN,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(
        PLAIN,
        context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    ),
    "none": lambda layer, hidden: layer(hidden),
}


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(LAYERS)
    )


@pytest.fixture
def sliding(tmp_path):
    return shardlab.SlidingCheckpoint.on_disk(tmp_path, "cpu")


def forward(layers, again=PLAIN, seed=1):
    torch.manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH).requires_grad_() * 1
    for layer in layers:
        hidden = again(layer, hidden)
    return hidden.exp().mean()


def gradients(layers):
    found = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    return found


def backward(layers, context, **options):
    with context:
        loss = forward(layers, **options)
    loss.backward()
    return gradients(layers)


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("again", AGAIN)
def test_gradients_are_the_same_bits_step_after_step(layers, sliding, again):
    expected = backward(layers, nullcontext(), again=AGAIN[again])
    for _ in range(3):
        assert equal(backward(layers, sliding, again=AGAIN[again]), expected)
    if again != "none":  # the inputs of regions and the result, of three passes
        assert sliding.offloaded_bytes == 3 * (LAYERS + 1) * NBYTES
        assert sliding.kept_bytes < sliding.offloaded_bytes


def test_passes_may_all_come_before_the_first_backward(layers, sliding):
    results = []
    for context in (sliding, nullcontext()):
        losses = []
        for seed in range(3):
            with context:
                losses.append(forward(layers, seed=seed))
        for number in (1, 0, 2):
            losses[number].backward()
        results.append(gradients(layers))
    assert equal(*results)


def test_a_block_within_a_block_of_the_same_object_ends_alone(layers, sliding):
    results = []
    for context in (sliding, nullcontext()):
        with context:
            with context:
                loss = forward(layers)
            loss = loss + forward(layers, seed=2)
        loss.backward()
        results.append(gradients(layers))
    assert equal(*results)
    stored = sliding.offloaded_bytes
    assert stored == 2 * (LAYERS + 1) * NBYTES
    forward(layers)
    assert sliding.offloaded_bytes == stored


def test_backward_runs_inside_of_the_block_and_again_on_a_graph_that_is_kept(layers, sliding):
    expected = backward(layers, nullcontext())
    with sliding:
        forward(layers).backward()
    assert equal(gradients(layers), expected)
    with sliding:
        loss = forward(layers)
    for _ in range(3):
        loss.backward(retain_graph=True)
        assert equal(gradients(layers), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_their_casts_masks_and_small_tensors_stay(sliding, dtype):
    weight = nn.Parameter(torch.randn(64, 64))
    mask, small = torch.ones(64, 64, dtype=dtype), torch.ones(4, requires_grad=True)

    def region(hidden, *others):
        return hidden @ others[0] @ others[1] * mask + others[3].sum()

    cast = weight.to(dtype)
    with sliding:
        hidden = torch.randn(64, 64, dtype=dtype).requires_grad_() * 1
        for _ in range(3):
            hidden = PLAIN(region, hidden, cast, cast.t(), mask, small)
    hidden.sum().backward()
    assert sliding.offloaded_bytes == 3 * hidden.nbytes
    assert sliding.kept_bytes == 3 * (mask.nbytes + small.nbytes)


@pytest.mark.parametrize("when", ["at once", "a region later", "outside of regions"])
def test_a_change_in_place_is_refused_as_it_is_without(layers, sliding, when):
    def run(context):
        with context:
            hidden = torch.randn(ROWS, WIDTH).requires_grad_() * 1
            after = PLAIN(layers[0], hidden)
            if when == "a region later":
                after = PLAIN(layers[1], after)
            if when == "outside of regions":
                hidden = after * 1
                after = hidden.square()
            hidden.add_(1)
            loss = after.sum()
        loss.backward()

    for context in (nullcontext(), sliding):
        with pytest.raises(RuntimeError, match=r"(in ?place)"):
            run(context)


def test_devices_and_folders_that_do_not_fit_are_refused(layers, tmp_path):
    with pytest.raises(UserError, match="on cpu, but the store is for meta"):
        backward(layers, shardlab.SlidingCheckpoint.on_disk(tmp_path, "meta"))
    with pytest.raises(UserError, match="in host memory already: use on_disk"):
        shardlab.SlidingCheckpoint.in_memory("cpu")
    for folder in ("/proc/shardlab", "/dev/null/folder"):
        with pytest.raises(UserError, match=f"^{folder}: no file can be made there .*another fold"):
            shardlab.SlidingCheckpoint.on_disk(folder)


def test_a_full_disk_is_an_error_in_one_line(tmp_path):
    def fill():
        layers = [nn.Linear(1024, 1024) for _ in range(4)]
        hidden = torch.ones(512, 1024).requires_grad_() * 1
        try:
            with shardlab.SlidingCheckpoint.on_disk(tmp_path, "cpu"):
                for layer in layers:
                    hidden = checkpoint(layer, hidden, use_reentrant=False)
        except UserError as error:
            print(error)

    said = said_after(partial(limit_files, 1 << 20), fill, tmp_path)
    assert "more bytes do not fit" in said and said.count("\n") == 1


def test_a_killed_process_leaves_no_file(tmp_path, layers):
    folder = tmp_path / "disk"

    def hold():
        with shardlab.SlidingCheckpoint.on_disk(folder, "cpu"):
            loss = forward(layers)
            print("kept", flush=True)
            signal.pause()
        loss.backward()

    command = Command(tmp_path / "command", hold)
    wait_for(lambda: command.said() == "kept\n")
    command.kill()
    assert [*folder.iterdir()] == []


FULL = {"activation_checkpointing": "full"}
SOME = {
    "activation_checkpointing": "selective",
    "overrides": [{"layers": 0, "activation_checkpointing": "full"}],
}


@pytest.mark.parametrize("checkpointing", [SOME, FULL], ids=["some", "full"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "manual", "slide"])
@on_ranks(2)
def test_engines_train_the_same_bits(group, tmp_path, engine, checkpointing) -> None:
    def steps(strategy):
        generator = torch.Generator().manual_seed(dist.get_rank(group))
        model, weights = drawn_model(Model(preset="tiny"), 300, 16, 0, 1)
        settings = parse_strategy(strategy), Optimization(clip=0.5), group
        with patch.dict(os.environ, {FOLDER_VARIABLE: str(tmp_path)}):
            made = build_engine(model, *settings, weights=weights)
        batches = torch.randint(300, (2, 2, 4, 17), generator=generator)
        losses = [made.step([*micro], 1e-3).loss for micro in batches]
        return [torch.tensor(losses), *whole_parameters(made).values()]

    plain = {"engine": engine, **checkpointing}
    assert equal(steps({**plain, "activations": "disk"}), steps(plain))


@on_ranks(1)
def test_memory_of_the_host_is_refused_where_it_is_that_of_the_device(group) -> None:
    model, weights = drawn_model(Model(preset="tiny"), 300, 16, 0, 1)
    strategy = parse_strategy({"engine": "ddp", **FULL, "activations": "memory"})
    with pytest.raises(UserError, match="activations: memory: on a CPU they are there already"):
        build_engine(model, strategy, Optimization(clip=0.5), group, weights=weights)


def test_the_constructor_names_the_two_ways_to_make_one():
    with pytest.raises(UserError, match=r"on_disk\(folder\) or in_memory\(\)"):
        shardlab.SlidingCheckpoint()
