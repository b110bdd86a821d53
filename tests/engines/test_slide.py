"""The slide engine trains as `ddp`, to the bit in float32, in all modes and under delays."""

import errno
import os
import signal
import weakref
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.train.launch import RunFailed, launch
from tests.engines.sliding_factory import model_of, slid, trained
from tests.engines.small_engine import (
    MODES,
    FailingCopies,
    PoisoningCopies,
    batch_of,
    differing,
    engine_of,
    states_of,
    train,
    weights_of,
)
from tests.ranks import on_ranks, run_ranks

SLIDE = {"engine": "slide"}
INT8 = {"gradients": {"codec": "int8"}}
FROZEN = {
    "first-blocks": ("wte", "wpe", "h.0.", "h.1."),
    "what-comes-first": ("wpe", "ln_1", "attn"),
    "all-but-one-block": ("wte", "wpe", "ln_f", "h.0.", "h.1.", "h.3."),
}
"""parts of names"""


@pytest.mark.parametrize("world_size, clip", [*product((1, 2), (None, 0.5))])
@on_ranks()
def test_all_modes_have_the_bits_of_ddp(group, world_size, clip) -> None:
    expected = engine_of(group, {"engine": "ddp"}, clip)
    curve, states = train(expected, 3), states_of(expected)
    for number, mode in enumerate(MODES.values()):
        again = ("none", "full")[(number + world_size + (clip is None)) % 2]
        document = {**mode, "activation_checkpointing": again}
        engine = engine_of(group, document, clip, accumulation=1)
        assert torch.equal(train(engine, 3), curve), document
        assert not differing(states_of(engine), states), document
    assert clip is None or (curve[:, 1] > clip).any()


@pytest.mark.parametrize("micro", [1, 3])
@on_ranks(2)
def test_any_number_of_micro_batches_has_the_bits_of_ddp(group, micro) -> None:
    expected = engine_of(group, {"engine": "ddp"})
    curve, states = train(expected, 2, micro), states_of(expected)
    for window, transfer in (2, "full"), (3, "shard"), (9, "full"):
        document = {**SLIDE, "param_transfer": transfer, "window": window}
        engine = engine_of(group, document)
        assert torch.equal(train(engine, 2, micro), curve), document
        assert not differing(states_of(engine), states), document


# every pair of what is frozen and a number of ranks, a way of clipping and two modes
@pytest.mark.parametrize("world_size, split", [*product((1, 2), FROZEN)])
@on_ranks()
def test_partly_frozen_training_has_the_bits_of_ddp(group, world_size, split) -> None:
    turn = world_size + [*FROZEN].index(split)
    frozen, clip = FROZEN[split], (None, 0.5)[turn % 2]
    expected = engine_of(group, {"engine": "ddp"}, clip, frozen=frozen)
    first = weights_of(expected)
    curve, weights = train(expected, 2), weights_of(expected)
    kept = {name for name in weights if any(part in name for part in frozen)}
    assert {*differing(weights, first)} == weights.keys() - kept and kept
    for number, mode in list(enumerate(MODES.values()))[turn % 2 :: 2]:
        again = ("none", "full")[(number // 2 + turn) % 2]
        document = {**mode, "activation_checkpointing": again}
        engine = engine_of(group, document, clip, accumulation=1, frozen=frozen)
        assert torch.equal(train(engine, 2), curve), document
        assert not differing(weights_of(engine), weights), document


@on_ranks(2)
def test_a_frozen_unit_sends_no_gradients_and_has_no_moments(group) -> None:
    for mode in MODES.values():
        engine = engine_of(group, mode, frozen=FROZEN["all-but-one-block"])
        train(engine, 2)
        [name] = engine.shards()["exp_avg"]
        elements = sum(t.numel() for n, t in weights_of(engine).items() if name in n)
        # of each of two steps the other rank's half
        assert engine.ledger.summary()["gradients"]["bytes_raw"] == 2 * elements * 4 / 2


# more layers than there are slots, with delays in which memory holds NaN
@pytest.mark.parametrize(
    ("document", "clip", "micro"),
    [
        (MODES["full-cpu_reduce"], None, 1),
        ({**MODES["full-cpu_reduce"], **INT8}, 0.5, 2),
        (MODES["shard-gpu_reduce"], None, 2),
        (MODES["full-gpu_reduce"], 0.5, 1),
    ],
)
@on_ranks(2)
def test_delays_change_no_bit(group, document, clip, micro) -> None:
    build = partial(engine_of, group, document, clip, accumulation=micro, layers=8)
    plain, delayed = build(), build(PoisoningCopies(dist.get_rank()))
    assert torch.equal(train(delayed, 2, micro), train(plain, 2, micro))
    assert not differing(states_of(delayed), states_of(plain))


@pytest.mark.parametrize(
    "ranks_per_node, world_size", [(1, 2), pytest.param(2, 4, marks=pytest.mark.long)]
)
@on_ranks()
def test_several_nodes_average_their_gradients(group, ranks_per_node, world_size) -> None:
    int8 = {**MODES["shard-gpu_reduce"], **INT8}
    expected = train(engine_of(group, {"engine": "ddp"}), 2)
    for document in (*MODES.values(), int8):
        engine = engine_of(group, document, ranks_per_node=ranks_per_node)
        curve, weights = train(engine, 2), weights_of(engine)
        tolerance = 1e-2 if document is int8 else 0 if world_size == 2 else 1e-5
        torch.testing.assert_close(curve, expected, rtol=tolerance, atol=0)
        assert engine.ledger.summary()["gradients"]["bytes_wire"] > 0
        same = [torch.zeros(()) for _ in range(world_size)]
        dist.all_gather(same, sum(weight.double().sum() for weight in weights.values()).float())
        assert len({float(each) for each in same}) == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_ranks(2)
def test_run_resumed_from_shards_is_bitwise_equal(group, dtype) -> None:
    document = {**SLIDE, "moment_dtype": dtype}
    engine = engine_of(group, document)
    train(engine, 2)
    saved = {
        kind: {name: tensor.clone() for name, tensor in tensors.items()}
        for kind, tensors in engine.shards().items()
    }
    expected = train(engine, 2, first=2), states_of(engine)
    other = engine_of(group, document, seed=2)
    for steps in (0, 1):  # before the first step, and in the middle of training
        train(other, steps)
        for kind, tensors in other.shards().items():
            for name, tensor in tensors.items():
                tensor.copy_(saved[kind][name])
        assert torch.equal(train(other, 2, first=2), expected[0])
        assert not differing(states_of(other), expected[1])


def test_narrow_moments_do_not_depend_on_the_number_of_ranks():
    """The gradients are equal sums, of one batch on each rank or of two micro-batches."""

    def on_rank(group):
        alone = dist.get_world_size(group) == 1
        engine = engine_of(group, {**SLIDE, "moment_dtype": "bf16"}, accumulation=2)
        for step in range(3):
            batches = [batch_of(step, 0), batch_of(step, 1)]
            engine.step(batches if alone else [batches[dist.get_rank(group)]] * 2, 1e-3)
        return weights_of(engine)

    alone, both = run_ranks(1, on_rank)[0], run_ranks(2, on_rank)[0]
    for name, weight in alone.items():
        torch.testing.assert_close(both[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["full-cpu_reduce", "shard-gpu_reduce"])
@pytest.mark.parametrize("clip", [None, 0.5])
@on_ranks(2)
def test_each_step_counts_what_moved_for_it(group, mode, clip) -> None:
    engine = engine_of(group, MODES[mode], clip=clip, copies=PoisoningCopies(0))
    moved = [0.0]
    for step in range(4):
        train(engine, 1, first=step)
        moved.append(engine.ledger.summary()["weights"]["bytes_raw"])
    later = torch.tensor(moved).diff()[1:]
    assert later[0] > 0 and (later == later[0]).all(), moved


@on_ranks(1)
def test_more_micro_batches_than_configured_are_refused(group) -> None:
    engine = engine_of(group, SLIDE, accumulation=1)
    with pytest.raises(UserError, match="a step of 2 micro-batches, and host memory is laid"):
        train(engine, 1, micro=2)
    train(engine, 1)


@on_ranks(1)
def test_changed_requires_grad_is_refused_until_it_is_set_back(group) -> None:
    model = model_of("llama-untied")
    model.model.embed_tokens.requires_grad_(False)
    sliding = slid(model)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        parameter = model.get_parameter(name)
        before = parameter.requires_grad
        parameter.requires_grad_(not before)
        with pytest.raises(UserError, match=f"^slide: requires_grad of {name} .* {not before}: "):
            trained(sliding, 0, 1)
        parameter.requires_grad_(before)
        trained(sliding, 0, 1)


@pytest.mark.fresh_ranks
@on_ranks(1)
def test_an_error_of_a_copy_ends_training(group) -> None:
    engine = engine_of(group, SLIDE, copies=FailingCopies(17))
    with pytest.raises(OSError, match="the link is down"):
        train(engine, 8)
    with pytest.raises((OSError, UserError), match=r"link is down|from a checkpoint"):
        train(engine, 1)


@pytest.mark.parametrize("clip", [0.5, None])
@on_ranks(1)
def test_a_step_interrupted_in_backward_cannot_be_continued(group, clip) -> None:
    model = model_of("llama-untied")
    sliding = slid(model, clip=clip)
    trained(sliding, 0, 1)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_full_backward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trained(sliding, 1, 2)
    hook.remove()
    with pytest.raises(UserError, match=r"broken off .KeyboardInterrupt.*from a checkpoint"):
        trained(sliding, 1, 2)


@on_ranks(2)
def test_nonfinite_gradient_without_clipping_ends_the_run(group) -> None:
    engine = engine_of(group, SLIDE, clip=None)
    train(engine, 1)

    def spoil(module, inputs, output):
        output.logits = output.logits * (torch.nan if dist.get_rank(group) == 0 else 1.0)
        return output

    engine.module.register_forward_hook(spoil)
    with pytest.raises(UserError, match="or set clip"):
        train(engine, 1)


@on_ranks(2)
def test_host_memory_that_does_not_fit_is_refused_on_all_ranks(group, monkeypatch) -> None:
    monkeypatch.setattr("shardlab.engines.slide_memory.free_memory_bytes", lambda: 100_000)
    with pytest.raises(UserError, match=r"GiB are free: take a smaller"):
        engine_of(group, SLIDE)


@pytest.mark.parametrize(
    ("world_size", "document"),
    [(1, SLIDE), (2, {**MODES["shard-gpu_reduce"], "moment_dtype": "bf16"})],
    ids=str,
)
@on_ranks()
def test_moments_on_disk_have_the_bits_of_those_in_memory(
    group, tmp_path, monkeypatch, world_size, document
) -> None:
    monkeypatch.setenv("SHARDLAB_MOMENTS", str(tmp_path / "moments"))
    inside = engine_of(group, document)
    on_disk = engine_of(group, {**document, "moments": "disk"})
    # nothing is left of a process that is killed now
    assert (tmp_path / "moments").is_dir() and not [*(tmp_path / "moments").iterdir()]
    assert torch.equal(train(on_disk, 3), train(inside, 3))
    assert not differing(states_of(on_disk), states_of(inside))
    other = engine_of(group, {**document, "moments": "disk"}, seed=2)
    train(other, 1)
    for kind, tensors in other.shards().items():
        for name, tensor in tensors.items():
            tensor.copy_(inside.shards()[kind][name])
    assert torch.equal(train(other, 2, first=3), train(inside, 2, first=3))
    assert not differing(states_of(other), states_of(inside))


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_full_disk_is_refused_before_the_first_step(
    group, tmp_path, monkeypatch, world_size
) -> None:
    def full(*reserved):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = r"moments do not fit into .*\(.*\): make room, name another folder"
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDLAB_MOMENTS", str(tmp_path / "file"))
    with pytest.raises(UserError, match=words):
        engine_of(group, {**SLIDE, "moments": "disk"})
    monkeypatch.setenv("SHARDLAB_MOMENTS", str(tmp_path / f"folder-{world_size}"))
    if world_size == 1:  # else the memory that ranks share is reserved by it, too
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UserError, match=words.replace(r"\(.*\)", r"\(No space.*\)")):
            engine_of(group, {**SLIDE, "moments": "disk"})
        assert not [*(tmp_path / "folder-1").iterdir()]


@on_ranks(2)
def test_nothing_is_left_in_shared_memory_and_a_deleted_engine_is_freed(group) -> None:
    engine = engine_of(group, SLIDE)
    train(engine, 2)
    assert not [*Path("/dev/shm").glob(f"shardlab-{os.getpid()}-*")]
    gone = weakref.ref(engine)
    del engine
    assert gone() is None


def test_a_killed_rank_ends_all_ranks():
    def worker(group):
        engine = engine_of(group, MODES["shard-gpu_reduce"])
        train(engine, 2)
        if dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(engine, 2)

    with pytest.raises(RunFailed, match="rank 1 was killed by signal 9"):
        launch(worker, 3, threads=1, timeout_s=30)
