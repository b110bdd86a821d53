"""Jobs get nodes, tasks, CPUs and GPUs for their ranks, which can be tasks of srun."""

import re
import shutil
from pathlib import Path

import pytest

from shardlab.core.files import read_json_lines
from tests.pipeline.workspace import copy_project, environment, run, set_params

SRUN = """#!/bin/sh
# two nodes with one task each, both of them on this machine
export SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2
export SLURM_STEP_NODELIST='127.0.0.[1-2]' SLURM_LOCALID=0
while case $1 in -*) true;; *) false;; esac; do shift; done
SLURM_PROCID=1 SLURM_NODEID=1 "$@" &
SLURM_PROCID=0 SLURM_NODEID=0 "$@" && wait $!
"""


def resources_of(root: Path, *defaults: str) -> dict[str, str]:
    """The resources of the jobs in a dry run, by their output."""
    arguments = ("--default-resources", *defaults) if defaults else ()
    said = run(root, "snakemake", "-n", *arguments).stdout
    outputs = re.findall(r"^    output: ([^,\n]*)", said, re.MULTILINE)
    resources = re.findall(r"^    resources: (.*)$", said, re.MULTILINE)
    assert len(outputs) <= len(resources)
    return dict(zip(outputs, resources, strict=False))


FOUR = {"four": {"runs": ["fsdp2"], "world_size": 4}}
TRAINED = "results/train/fsdp2/seed0/metrics.json"
OF_NODES = ("mpi=", "tasks=", "tasks_per_node=", "tasks_per_gpu=", "gres=")


@pytest.mark.long
def test_ranks_are_spread_over_nodes_tasks_cpus_and_gpus(tmp_path: Path) -> None:
    ranks = 8
    root = copy_project(tmp_path / "project")
    set_params(
        root,
        train__world_size=ranks,
        train__threads=8,
        train__batch_size=8,
        **{"timings__two-ranks__world_size": ranks},
    )
    alone = resources_of(root)[TRAINED]
    assert "nodes=1, " in alone and f"cpus_per_task={8 * ranks}," in alone
    assert not any(name in alone for name in OF_NODES)
    found = resources_of(root, "rank_nodes=2", "rank_gpus=1")
    here = ranks // 2
    start = (
        f"srun --nodes=2 --ntasks={ranks} --ntasks-per-node={here} --cpus-per-task=8 "
        f"--distribution=block --kill-on-bad-exit=1 --gres=gpu:{here}"
    )
    expected = f"nodes=2, gres=gpu:{here}, mpi=srun, tasks_per_node={here}, cpus_per_task=8"
    spread = ("results/calibration.json", TRAINED, "results/timings/two-ranks.jsonl")
    for output in spread:
        assert set(expected.split(", ")) <= set(found[output].split(", ")), output
        assert f"start={start}" in found[output] and " gpu=" not in found[output]
    assert f"steps= --start '{start}'" in found["results/rounds/1/trial.json"]
    # an emulated link
    linked = found["results/timings/link-100mbit.jsonl"]
    assert "nodes=1" in linked and "srun" not in linked
    # without GPUs nothing asks for them
    assert "gres" not in resources_of(root, "rank_nodes=2", "rank_gpus=0")[TRAINED]


@pytest.mark.parametrize(
    ("default", "message"),
    [
        ("rank_nodes=0", "rank_nodes: expected a whole number from 1 on"),
        ("rank_nodes=2", "timings.two-ranks.interleaved: timings take turns on one machine"),
    ],
)
def test_mistakes_in_a_profile_are_one_line(tmp_path: Path, default: str, message: str) -> None:
    root = copy_project(tmp_path / "project")
    set_params(root, **{"timings__two-ranks__interleaved": {"one": {"world_size": 1}}})
    said = run(root, "snakemake", "-n", "--default-resources", default, check=False).stdout
    _, line = said.splitlines()  # the first names the profile
    assert line.startswith(message)


def test_calibration_gets_the_cores_of_the_most_ranks(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    set_params(root, **{"timings__two-ranks__interleaved": FOUR}, forecast={"timings": ["four"]})
    assert "cpus_per_task=4," in resources_of(root)["results/calibration.json"]


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
    options = ("--cores", "2", "--default-resources", "rank_nodes=2", "rank_gpus=0")
    target = str((folder / "events.jsonl").relative_to(workspace))
    run(workspace, "env", path, "snakemake", *options, "--", target)
    assert [event["loss"] for event in read_json_lines(folder / "events.jsonl")] == losses
    log = (workspace / "logs/train/fsdp2/0.log").read_text()
    assert log.count("done in") == 2, "the tasks have one log"
