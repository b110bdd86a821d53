"""TensorBoard finds the scalars of a run, and its profiler plugin the trace of each rank."""

import re

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardlab.experiment.schema import Model, Train
from shardlab.loop.plan import RunPlan
from shardlab.profiling.traces.trace_file import read_events, read_header
from shardlab.strategy.strategy import parse_strategy
from shardlab.train.run import train_run

TRAIN = Train(steps=2, batch_size=2, sequence_length=16, untimed_steps=1, warmup_steps=1)
# torch_tb_profiler/consts.py, version 0.4.3
WORKER = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")


def test_a_run_leaves_scalars_and_traces_for_tensorboard(data, tmp_path):
    strategy, folder = parse_strategy({"engine": "ddp"}), tmp_path / "logs"
    plan = RunPlan("a-run", 0, strategy, TRAIN, Model(preset="tiny"), data)
    train_run(plan, tmp_path / "run", telemetry=folder)
    assert len(EventAccumulator(str(folder)).Reload().Scalars("train/loss")) == 2
    workers = {match[1]: path for path in folder.iterdir() if (match := WORKER.match(path.name))}
    assert workers.keys() == {"rank0", "rank1"}
    for worker, path in workers.items():
        assert f"rank{read_header(path)['distributedInfo']['rank']}" == worker
        assert any(event["name"].startswith("ProfilerStep#") for event in read_events(path))
