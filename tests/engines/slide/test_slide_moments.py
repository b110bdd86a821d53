"""Training with moments on disk and in bf16, against moments in memory."""

import os
import resource
import signal
from functools import partial
from itertools import product
from tempfile import gettempdir
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import shardlab
from shardlab.core.errors import UserError
from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from shardlab.train.launch import RunFailed, launch
from tests.commands import said_after
from tests.disks import mount
from tests.engines.slide import small_engine
from tests.engines.small_engine import batch_of, differing, states_of, train
from tests.families import config_of
from tests.ranks import on_ranks, run_ranks

SLIDE = {"engine": "slide"}
DISK = {"engine": "slide", "moments": "disk"}
BF16 = {"engine": "slide", "moment_dtype": "bf16"}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "disk"))
    return tmp_path / "disk"


def on_disk():
    """Files outside of the tree, also from ranks that are kept: there the variable is not set."""
    place = os.environ.get(FOLDER_VARIABLE, gettempdir())
    return patch.dict(os.environ, {FOLDER_VARIABLE: place})


def engine_of(*arguments, **options):
    with on_disk():
        return small_engine.engine_of(*arguments, **options)


# every pair of settings
@pytest.mark.parametrize(
    ("world_size", "dtype", "sync", "clip"),
    [
        (1, "fp32", "cpu_reduce", None),
        (1, "fp32", "gpu_reduce", 0.5),
        (1, "bf16", "cpu_reduce", 0.5),
        (1, "bf16", "gpu_reduce", None),
        pytest.param(3, "fp32", "gpu_reduce", None, marks=pytest.mark.long),
        (3, "bf16", "cpu_reduce", 0.5),
    ],
)
@on_ranks()
def test_moments_on_disk_have_the_bits_of_those_in_memory(
    group, world_size, dtype, sync, clip
) -> None:
    both, micro = [], 2 if dtype == "fp32" else 1
    for place in ("memory", "disk"):
        document = {**SLIDE, "moments": place, "moment_dtype": dtype, "grad_sync": sync}
        engine = engine_of(group, document, clip)
        both.append((train(engine, 2, micro), states_of(engine)))
        # what was looked at between steps is the same afterwards
        both[-1] += (train(engine, 2, micro, first=2), states_of(engine))
    memory, disk = both
    assert torch.equal(memory[0], disk[0]) and torch.equal(memory[2], disk[2])
    assert not differing(memory[1], disk[1]) and not differing(memory[3], disk[3])


@pytest.mark.parametrize(
    "document",
    [*(pytest.param(each, marks=pytest.mark.long) for each in (DISK, BF16)), {**DISK, **BF16}],
)
@on_ranks(2)
def test_run_resumed_from_shards_is_bitwise_equal(group, document) -> None:
    engine = engine_of(group, document)
    train(engine, 3)
    saved = {
        kind: {name: tensor.clone() for name, tensor in tensors.items()}
        for kind, tensors in engine.shards().items()
    }
    expected = train(engine, 3, first=3), states_of(engine)
    other = engine_of(group, document, seed=2)
    for steps in (0, 2):  # before the first step, and in the middle of training
        train(other, steps)
        for kind, tensors in other.shards().items():
            for name, tensor in tensors.items():
                tensor.copy_(saved[kind][name])
        assert torch.equal(train(other, 3, first=3), expected[0])
        assert not differing(states_of(other), expected[1])


@pytest.mark.parametrize("document", [SLIDE, DISK])
@on_ranks(2)
def test_writes_of_one_rank_to_shared_moments_reach_all(group, document) -> None:
    rank, written, expected = dist.get_rank(group), {}, engine_of(group, document)
    train(expected, 2)
    saved = {kind: dict(named) for kind, named in expected.in_host_memory().items()}
    engine = engine_of(group, document, seed=2)
    train(engine, 1)
    dist.barrier(group)
    for kind, named in engine.in_host_memory().items():
        for number, (name, tensor) in enumerate(named.items()):
            if kind == "step" or number % 2 == rank:
                tensor.copy_(saved[kind][name])
                written[name] = None
    engine.take_in()
    assert torch.equal(train(engine, 2, first=2), train(expected, 2, first=2))
    assert not differing(states_of(engine), states_of(expected))
    assert len(written) > 4


def test_narrow_moments_do_not_depend_on_the_number_of_ranks():
    """Every rank has the same samples, so that all have the gradient of the one that is alone."""

    def on_rank(group):
        engine = engine_of(group, BF16, clip=None)
        for step in range(3):
            engine.step([batch_of(step, 0)], 1e-3)
        return states_of(engine)

    expected, found = [run_ranks(world_size, on_rank)[0] for world_size in (1, 2)]
    assert expected["exp_avg_sq.transformer.wte.weight"].dtype is torch.bfloat16
    assert not differing(found, expected)


@on_ranks(1)
def test_narrow_moments_cost_little_loss(group) -> None:
    wide, narrow = (train(engine_of(group, each), 30)[:, 0] for each in (SLIDE, BF16))
    torch.testing.assert_close(narrow, wide, rtol=0.01, atol=0)
    assert wide[0] - wide[-1] > 10 * (narrow - wide).abs().max()


@on_ranks(1)
def test_bf16_second_moments_decay_by_stochastic_rounding(group) -> None:
    engine = engine_of(group, BF16, betas=(0.9, 0.999))
    state, steps = engine.shards(), 50
    for name in state["exp_avg_sq"]:
        state["exp_avg_sq"][name].fill_(1.0)
        state["step"][name].fill_(1000)
    train(engine, steps)
    for name, second in states_of(engine).items():
        if name.startswith("exp_avg_sq") and second.numel() > 1000:
            assert second.float().mean() == pytest.approx(0.999**steps, rel=0.003), name


def test_checkpoint_of_bf16_moments_on_disk_loads_into_any_other_setting(tmp_path):
    def sliding_of(seed, **settings):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of("llama-untied", attention_dropout=0.0))
        with on_disk():
            return shardlab.SlideFSDP(model.train(), shardlab.SlideConfig(1e-3, **settings))

    def trained(sliding, first, last):
        for step in range(first, last):
            tokens = batch_of(step, 0)
            sliding(input_ids=tokens, labels=tokens)
        return sliding._engine.in_host_memory()

    def save(group):
        sliding = sliding_of(0, moments="disk", moment_dtype="bf16")
        trained(sliding, 0, 2)
        sliding.save(tmp_path / "saved")
        state = trained(sliding, 2, 3)
        return {name: tensor.float() for name, tensor in state["exp_avg_sq"].items()}

    def load(group):
        found = {}
        for place, dtype in product(("memory", "disk"), ("fp32", "bf16")):
            sliding = sliding_of(1, moments=place, moment_dtype=dtype)
            trained(sliding, 0, 1)
            sliding.load(tmp_path / "saved")
            state = trained(sliding, 2, 3)["exp_avg_sq"]
            found |= {f"{dtype} {name}": tensor.float() for name, tensor in state.items()}
        return found

    expected = run_ranks(3, save)[0]
    for found in run_ranks(2, load):
        for name, tensor in expected.items():
            assert torch.equal(found[f"bf16 {name}"], tensor)
            torch.testing.assert_close(found[f"fp32 {name}"], tensor, rtol=0.02, atol=1e-12)


@on_ranks(2)
def test_failed_write_is_raised_by_the_next_calls_on_all_ranks(group, folder) -> None:
    mine = dist.get_rank(group) == 1
    engine = engine_of(group, DISK)
    train(engine, 2)
    engine.synchronize()
    if mine:  # no file may be written beyond
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    error = UserError if mine else RuntimeError
    for _ in range(2):
        with pytest.raises(error, match=f"{folder}: .* bytes do not fit"):
            train(engine, 2)


@pytest.mark.parametrize("look", ["shards", "in_host_memory"])
@on_ranks(2)
def test_failed_read_is_raised_on_all_ranks_before_moments_are_used(group, folder, look) -> None:
    engine = engine_of(group, DISK)
    train(engine, 2)
    getattr(engine, look)()
    engine.synchronize()
    dist.barrier(group)
    if dist.get_rank(group) == 1:
        file = engine._moments._file._cached.descriptor
        os.ftruncate(file, os.fstat(file).st_size // 2)
    dist.barrier(group)
    reported = rf"^slide: a file in {folder} could not be read: it ends too early: [^\n]* or with "
    for _ in range(2):
        with pytest.raises(UserError, match=reported):
            getattr(engine, look)()


def test_too_small_a_disk_is_refused_on_all_ranks_before_training(tmp_path, folder):
    folder.mkdir()

    def on_rank(group):
        with pytest.raises(UserError) as refused:
            engine_of(group, DISK)
        print(refused.value, flush=True)

    small = partial(mount, "tmpfs", folder, "size=64k")
    said = said_after(small, partial(run_ranks, 2, on_rank), tmp_path)
    # both ranks write to one file, and a line of one may end behind that of the other
    assert said.count(f"{folder}: ") == said.count("more bytes do not fit") == 2, said


def test_when_a_rank_is_killed_nothing_is_left_on_disk(folder):
    def worker(group):
        engine = engine_of(group, DISK)
        train(engine, 2)
        assert [*folder.iterdir()] == []
        if dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(engine, 2)

    with pytest.raises(RunFailed, match="rank 1 was killed by signal 9"):
        launch(worker, 3, threads=1, timeout_s=30)
    assert [*folder.iterdir()] == []
