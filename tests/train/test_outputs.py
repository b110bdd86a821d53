"""The trained model is gathered on rank 0, and TensorBoard finds scalars and traces."""

import re

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardlab.experiment.schema import Model, Train
from shardlab.launch import RunFailed
from shardlab.loop.plan import RunPlan
from shardlab.profiling.traces.trace_file import read_events, read_header
from shardlab.strategy.strategy import parse_strategy
from shardlab.train.outputs import gather_trained
from shardlab.train.run import train_run
from tests.deep_models import (
    deep_model,
    engine_of,
    highest_since_reset,
    keep_no_freed_memory,
    reset,
    size_of,
)
from tests.ranks import run_ranks

STRATEGIES = {
    "ddp": {"engine": "ddp"},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1-original": {"engine": "fsdp1", "use_orig_params": True},
    "fsdp2": {"engine": "fsdp2"},
    "manual": {"engine": "manual"},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_whole_model_is_gathered_on_rank_0_only(name):
    def on_rank(group):
        keep_no_freed_memory()
        model = deep_model()
        whole, names = size_of(model), [name for name, _ in model.named_parameters()]
        engine = engine_of(model, STRATEGIES[name], group)
        reset()
        before = highest_since_reset()
        trained = gather_trained(engine, group)
        grown = (highest_since_reset() - before) / whole
        assert sorted(trained) == (sorted(names) if dist.get_rank(group) == 0 else [])
        return {"grown": torch.tensor(grown)}

    first, *others = [float(result["grown"]) for result in run_ranks(4, on_rank)]
    assert first > 0.9
    # a sixteenth for the unit in work and as much for the copies that gathering makes; 0.30 was
    # seen once, by what is not known: perhaps messages that threads of gloo had not yet let go
    assert max(others) < 0.5


def test_diverged_replicas_are_refused():
    def on_rank(group):
        engine = engine_of(deep_model(), STRATEGIES["ddp"], group)
        if dist.get_rank(group) == 1:
            engine.shards()["parameter"]["transformer.h.3.ln_1.bias"][7] += 1e-6
        gather_trained(engine, group)
        return {}

    with pytest.raises(RunFailed, match=r"different parameters.*\['transformer.h.3.ln_1.bias'\]"):
        run_ranks(2, on_rank)


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
