"""Real traces by torch.profiler alone: without labels the breakdown is that of the labelled run."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from shardlab.profiling.breakdown import read_steps
from shardlab.profiling.job import break_down
from shardlab.profiling.merge import merge_traces
from shardlab.train.launch import launch

STEPS = 3
LABELS = ("shardlab::forward", "shardlab::backward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")

    def worker(group):
        torch.manual_seed(0)
        blocks = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
        # several buckets, whose collectives end after the last node of the autograd engine
        model = DistributedDataParallel(
            nn.Sequential(*blocks), process_group=group, bucket_cap_mb=0.3
        )
        optimizer = torch.optim.AdamW(model.parameters())
        plan = schedule(wait=0, warmup=2, active=STEPS, repeat=1)
        with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
            for _ in range(STEPS + 2):
                optimizer.zero_grad()
                with record_function(LABELS[0]):
                    loss = model(torch.randn(256, 256)).square().mean()
                with record_function(LABELS[1]):
                    loss.backward()
                optimizer.step()
                profiler.step()
        profiler.export_chrome_trace(str(folder / f"{dist.get_rank(group)}.json"))

    launch(worker, 2, threads=1, timeout_s=120)
    return folder


def without(folder, names):
    """Copies of the traces without events whose names begin like one of `names`."""
    paths = []
    for rank in range(2):
        trace = json.loads((folder / f"{rank}.json").read_text())
        events = trace["traceEvents"]
        trace["traceEvents"] = [e for e in events if not str(e["name"]).startswith(names)]
        paths.append(folder / f"without-{len(names)}-{rank}.json")
        paths[-1].write_text(json.dumps(trace, indent=2))
    return paths


@pytest.mark.parametrize(("names", "first"), [(LABELS, 2), ((*LABELS, "ProfilerStep#"), 1)])
def test_passes_without_labels_are_those_with_labels(folder, names, first):
    merge_traces([folder / f"{rank}.json" for rank in range(2)], folder / "merged.json.gz")
    labelled = read_steps(folder / "merged.json.gz")
    job = break_down(without(folder, names)[::-1])
    assert [(s.rank, s.step) for s in job.steps] == [
        (r, first + n) for r in (0, 1) for n in range(STEPS)
    ]
    for step in job.steps:
        parts = step.compute_ms + step.exposed_comm_ms + step.exposed_copy_ms + step.idle_ms
        assert parts == pytest.approx(step.step_ms)
        passes = step.forward_ms + step.backward_ms + step.update_ms
        assert passes == pytest.approx(step.step_ms)
        assert set(step.comm_ms_by_op) == {"gloo:all_reduce"}
        assert step.optimizer_ms < step.update_ms
    if first == 2:  # inferred steps begin and end some events earlier or later
        for name in ("comm_ms", "compute_ms", "idle_ms", "comm_skew_ms"):
            times = [[getattr(step, name) for step in steps] for steps in (job.steps, labelled)]
            assert times[0] == pytest.approx(times[1])
    assert "all ranks: forward, backward: inferred from the operators of" in "".join(job.notes)
