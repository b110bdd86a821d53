"""The rule of a run can be a SLURM step with one task for each rank."""

import shutil
from pathlib import Path

import pytest

from shardlab.core.files import read_json_lines
from tests.pipeline.workspace import copy_project, environment, run

SRUN = """#!/bin/sh
# two nodes with one task each, both of them on this machine
export SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2
export SLURM_STEP_NODELIST='127.0.0.[1-2]' SLURM_LOCALID=0
SLURM_PROCID=1 SLURM_NODEID=1 "$@" &
SLURM_PROCID=0 SLURM_NODEID=0 "$@" && wait $!
"""


def test_slurm_tasks_are_requested_by_resources(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    plan = ("snakemake", "-n", "-p", "--set-resources", "train:tasks=2")
    command = "python -m stages.train --run fsdp2 --seed 0"
    assert f"exec srun {command}" in run(root, *plan, "train:mpi=srun").stdout
    timing = "python -m stages.timing"
    started = run(root, *plan, "--set-resources", "timing:mpi=srun").stdout
    # those of the matrix: other timings have other ranks
    assert f"exec srun {timing} two-ranks" in started
    assert f"{timing} one-rank" in started and f"srun {timing} one-rank" not in started
    alone = run(root, *plan).stdout
    assert command in alone and "srun" not in alone


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_slurm_tasks_match_one_command(workspace: Path, tmp_path: Path) -> None:
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    folder = workspace / "results/train/fsdp2/seed0"
    losses = [event["loss"] for event in read_json_lines(folder / "events.jsonl")]
    shutil.rmtree(folder)
    path = f"PATH={srun.parent}:{environment()['PATH']}"
    options = ("--cores", "2", "--set-resources", "train:mpi=srun", "train:tasks=2")
    target = str((folder / "events.jsonl").relative_to(workspace))
    run(workspace, "env", path, "snakemake", *options, "--", target)
    assert [event["loss"] for event in read_json_lines(folder / "events.jsonl")] == losses
    log = (workspace / "logs/train/fsdp2/0.log").read_text()
    assert log.count("done in") == 2, "the tasks have one log"
