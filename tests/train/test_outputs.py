"""The trained model is gathered on rank 0, and TensorBoard finds scalars and traces."""

import dataclasses
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardlab.core.errors import StorageError, UserError
from shardlab.core.files import read_json_lines
from shardlab.models.settings import Model
from shardlab.profiling.trace_file import load_trace
from shardlab.strategy.document import parse_strategy
from shardlab.train.loop import Loop, StepEvent
from shardlab.train.outputs import Telemetry, check_equal, checksum, gather_trained
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run
from shardlab.train.settings import Checkpoint, Train, ValidationCurve
from tests.ranks import on_ranks
from tests.train.checkpointed import Run, plan_of, strategy_of


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@on_ranks(2)
def test_whole_model_is_gathered_on_rank_0_and_equal_replicas_are_checked(
    group, data, tmp_path, engine
):
    chief = dist.get_rank(group) == 0
    run = Run.start(plan_of(data, strategy_of(engine)), tmp_path, group)
    names = {name for part in run.engine.whole_parameters() for name in part}
    assert gather_trained(run.engine, group).keys() == (names if chief else set())
    if engine == "ddp":
        if not chief:
            run.engine.shards()["parameter"]["transformer.h.1.ln_1.bias"][7] += 1e-6
        expected = r"after training rank 1 holds other values of transformer\.h\.1\.ln_1\.bias"
        with pytest.raises(UserError, match=expected):
            gather_trained(run.engine, group)


TINY = Model(preset="tiny")
TRAIN = Train(steps=2, batch_size=2, sequence_length=16, untimed_steps=1, warmup_steps=1)
# torch_tb_profiler/consts.py, version 0.4.3
WORKER = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")


def test_a_run_leaves_scalars_and_traces_for_tensorboard(data, tmp_path):
    feedback = {"codec": "int8", "error_feedback": True}
    strategy = parse_strategy({"engine": "ddp", "gradients": feedback})
    folder, run = tmp_path / "logs", tmp_path / "run"
    train = TRAIN.model_copy(update={"validation": ValidationCurve(every=1), "clip": 0.1})
    train_run(RunPlan("a-run", 0, strategy, train, TINY, data), run, telemetry=folder)
    scalars, events = EventAccumulator(str(folder)).Reload(), read_json_lines(run / "events.jsonl")
    for tag, name in (
        ("train/residual_norm", "residual_norm"),
        ("train/clipped_steps", "clipped_steps"),
        ("train/skipped_steps", "skipped_steps"),
        ("validation/loss", "val_loss"),
    ):
        shown = [(scalar.step, scalar.value) for scalar in scalars.Scalars(tag)]
        # ranks hold back different gradients, and rank 0 writes its own norm
        values = [(event["step"], event[name]) for event in events if name in event]
        assert [step for step, _ in shown] == [step for step, _ in values]
        if name != "residual_norm":
            assert shown == [(step, pytest.approx(value)) for step, value in values]
        else:
            assert all(0 < one[1] < whole[1] for one, whole in zip(shown, values, strict=True))
    assert len(scalars.Scalars("train/loss")) == len(scalars.Scalars("memory/peak_bytes")) == 2
    assert all(event["memory_peak_bytes"] > 10**6 for event in events)
    assert [event["memory_reserved_bytes"] for event in events] == [None, None]
    workers = {match[1]: path for path in folder.iterdir() if (match := WORKER.match(path.name))}
    assert workers.keys() == {"rank0", "rank1"}
    for worker, path in workers.items():
        header, events = load_trace(path)
        assert f"rank{header['distributedInfo']['rank']}" == worker
        assert any(event["name"].startswith("ProfilerStep#") for event in events)


def test_outputs_are_probed_before_the_first_step(data, tmp_path, monkeypatch):
    """One line names what is missing where, before any step (attack 10 of the review)."""
    stepped = tmp_path / "stepped"
    # no step of the other rank ends without rank 0
    monkeypatch.setattr(Loop, "run", lambda *_: dist.get_rank() or stepped.touch())
    plan = RunPlan("a-run", 0, parse_strategy({"engine": "ddp"}), TRAIN, TINY, data)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/run: cannot be written .*: remove what"):
        train_run(plan, tmp_path / "file/run")
    no_space = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: no_space)
    checkpointed = dataclasses.replace(
        plan, train=TRAIN.model_copy(update={"checkpoint": Checkpoint(every=1)})
    )
    sizes = []
    for each in (plan, checkpointed):
        with pytest.raises(StorageError, match="1e-06 GB are free: free space") as error:
            train_run(each, tmp_path / "run", checkpoints=tmp_path / "checkpoints")
        sizes.append(float(re.search(r"about (\S+) GB", str(error.value))[1]))
        assert "\n" not in str(error.value) and len(str(error.value)) <= 300
    # the model; then also two checkpoints, each with the model and both moments
    assert sizes[1] == pytest.approx(sizes[0] * (1 + 2 * 3), rel=0.01)
    assert not stepped.exists()


def test_times_of_a_device_are_written_when_they_are_known(tmp_path):
    events = [StepEvent(step, 1.0, 1.0, 1.0, 1.0, True, 1) for step in range(3)]
    telemetry = Telemetry(tmp_path)
    telemetry.write(events[0])
    events[0].collective_ms = 5.0
    telemetry.write(events[1])
    telemetry.write(events[2])
    events[1].collective_ms, events[2].collective_ms = 6.0, 7.0
    telemetry.close()
    scalars = EventAccumulator(str(tmp_path)).Reload()
    found = [(each.step, each.value) for each in scalars.Scalars("speed/collective_ms")]
    assert found == [(0, 5.0), (1, 6.0), (2, 7.0)]
    assert [each.step for each in scalars.Scalars("train/loss")] == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_sees_every_single_bit(dtype):
    vector = torch.randn(33).to(dtype)
    before = checksum(vector)
    assert checksum(vector.clone()) == before
    for index in (0, 17, 32):
        for bit in range(8 * vector.element_size()):
            turned = vector.clone()
            turned[index : index + 1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert checksum(turned) != before


@on_ranks(4)
def test_one_rank_of_four_is_named(group) -> None:
    rank = dist.get_rank(group)
    sums = {"weight [0]": 5, f"bias [{rank % 2}]": 7 + (rank == 3)}
    check_equal({"weight [0]": 5}, "now", group)
    for when, found in (("bias", sums), ("weight", {"weight [0]": int(rank == 2)})):
        with pytest.raises(UserError) as refused:
            check_equal(found, when, group)
        assert refused.match(rf"^{when} rank {3 if when == 'bias' else 2} holds other values")
