"""The pipeline through a real SLURM: what its jobs get, where they run, and what they survive."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlab.core.files import read_json_lines
from tests.cluster.conftest import RATE, Project
from tests.cluster.slurm import Cluster, run, wait_for
from tests.pipeline.workspace import set_params

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

TRAINED = "results/train/fsdp2/seed0"


def allocated(job: dict[str, str]) -> dict[str, str]:
    """`cpu=128,mem=8000M,node=2` -> its parts."""
    return dict(part.split("=", 1) for part in job["TRES"].split(","))


@pytest.fixture(scope="session")
def prepared(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with tokens, and a profile for ranks on two nodes."""
    project = Project(tmp_path_factory.mktemp("prepared") / "project")
    project.profile(rank_nodes=2)
    project.run("data/params.yaml", "data/tokens/manifest.json")
    return project


@pytest.fixture(scope="session")
def ran(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The quick DAG from nothing, its ranks on two nodes."""
    project = Project(tmp_path_factory.mktemp("ran") / "project")
    project.profile(rank_nodes=2)
    project.run("all")
    return project


def test_the_quick_dag_runs_on_two_nodes(cluster: Cluster, ran: Project) -> None:
    assert (ran.root / "results/report/report.html").exists()
    jobs = {job["Comment"]: job for job in cluster.jobs()}
    several = ["rule_calibrate", "rule_trial_wildcards_1", "rule_timing_wildcards_two-ranks"]
    several += [name for name in jobs if name.startswith("rule_train_")]
    assert len(several) == 3 + 2
    for name in several:
        assert jobs[name]["NumNodes"] == "2", name
        assert jobs[name]["NumTasks"] == "2", name
    # a single rank, and an emulated link
    assert jobs["rule_timing_wildcards_link-100mbit"]["NumNodes"] == "1"
    assert jobs["rule_timing_wildcards_link-100mbit"]["NumNodes"] == "1"


def test_what_ran_on_two_nodes_names_their_network(ran: Project) -> None:
    calibration = json.loads((ran.root / "results/calibration.json").read_text())
    assert {each["link"] for each in calibration["transfers"]} == {"network of 2 nodes"}
    hardware = json.loads((ran.root / "results/hardware.json").read_text())
    (connection,) = hardware["connections"]
    # the payload of frames is 95.6 % of the rate; nothing is faster than the link
    assert 0.5 * RATE / 8e6 < connection["mb_per_s"] < RATE / 8e6
    timed = read_json_lines(ran.root / "results/timings/two-ranks.jsonl")
    assert {each["link"] for each in timed} == {"network of 2 nodes"}
    metrics = json.loads((ran.root / TRAINED / "metrics.json").read_text())
    assert metrics["link"] == "network of 2 nodes"
    trial = json.loads((ran.root / "results/rounds/1/trial.json").read_text())
    assert {run["link"] for run in trial["race"]["runs"]} == {"network of 2 nodes"}


RECORDER = """
import json, os, sys
from collections.abc import Iterator
from pathlib import Path
names = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE",
         "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "SLURM_PROCID")
Path("found").mkdir(exist_ok=True)
found = {name: os.environ.get(name) for name in names}
Path("found", found["SLURM_PROCID"] or "0").write_text(json.dumps(found))
run, seed = sys.argv[sys.argv.index("--run") + 1], sys.argv[sys.argv.index("--seed") + 1]
folder = Path("results/train", run, f"seed{seed}")
(folder / "final_model").mkdir(parents=True, exist_ok=True)
for name in ("metrics.json", "events.jsonl", "trace.json.gz", "final_model/config.json",
             "final_model/model.safetensors", "final_model/tokenizer.json",
             "final_model/tokenizer_config.json"):
    (folder / name).touch()
"""


@pytest.mark.parametrize(
    ("ranks", "rank_nodes", "nodes", "tasks"),
    [(8, 1, 1, 1), (1, 2, 1, 1), (8, 2, 2, 8)],
)
def test_a_rank_gets_its_cpus_and_its_gpu(
    cluster: Cluster,
    prepared: Project,
    tmp_path: Path,
    ranks: int,
    rank_nodes: int,
    nodes: int,
    tasks: int,
) -> None:
    """The stage records what it was given in place of training."""
    project = Project(tmp_path / "project")
    shutil.copytree(prepared.root / "data", project.root / "data", dirs_exist_ok=True)
    (project.root / "stages/train.py").write_text(RECORDER)
    set_params(
        project.root,
        train__world_size=ranks,
        train__threads=8,
        train__batch_size=8,
        **{"timings__two-ranks__world_size": ranks},
    )
    project.profile(exclusive=False, rank_nodes=rank_nodes)
    project.run(f"{TRAINED}/metrics.json")
    job = cluster.jobs()[-1]
    assert job["Comment"] == "rule_train_wildcards_fsdp2_0"
    assert (job["NumNodes"], allocated(job)["cpu"]) == (str(nodes), str(8 * ranks))
    assert job["JOB_GRES"] == f"gpu:{ranks}"
    found = [json.loads(path.read_text()) for path in (project.root / "found").iterdir()]
    assert len(found) == tasks
    for task in found:
        assert task["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(ranks // nodes)))
        assert task["SLURM_CPUS_PER_TASK"] == str(8 * ranks // tasks)
        assert (task["SLURM_STEP_NUM_TASKS"], task["SLURM_STEP_NUM_NODES"]) == (
            str(tasks),
            str(nodes),
        )


@pytest.fixture
def interrupted(
    cluster: Cluster, prepared: Project, tmp_path: Path
) -> Iterator[tuple[Project, subprocess.Popen[str]]]:
    """A run on two nodes that has written a checkpoint."""
    project = Project(tmp_path / "project")
    shutil.copytree(prepared.root / "data", project.root / "data", dirs_exist_ok=True)
    set_params(project.root, train__steps=STEPS, train__checkpoint={"every": 20})
    project.profile(rank_nodes=2)
    process = project.start(f"{TRAINED}/metrics.json")
    folder = project.root / ".work/checkpoints/fsdp2/seed0"
    wait_for(lambda: any(folder.glob("step-*")), "a checkpoint", 300)
    yield project, process
    process.kill()
    process.wait()
    run("scancel", "--user=root", check=False)  # it fails where there is nothing to cancel


STEPS = 200


def assert_continued(project: Project, process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate()
    assert process.returncode == 0, said + project.logs()
    assert "fsdp2 seed 0: continues after step" in project.logs()
    events = read_json_lines(project.root / TRAINED / "events.jsonl")
    assert [event["step"] for event in events] == [*range(STEPS)]


def test_a_requeued_job_continues_from_its_checkpoint(
    cluster: Cluster, interrupted: tuple[Project, subprocess.Popen[str]]
) -> None:
    project, process = interrupted
    job = cluster.jobs(JobState="RUNNING")[-1]["JobId"]
    run("scontrol", "requeue", job)
    assert_continued(project, process)
    assert cluster.jobs(JobId=job)[0]["Restarts"] == "1"


def test_a_job_continues_on_other_nodes_when_it_loses_one(
    cluster: Cluster, interrupted: tuple[Project, subprocess.Popen[str]]
) -> None:
    project, process = interrupted
    job = cluster.jobs(JobState="RUNNING")[-1]
    assert job["NodeList"] == "n[1-2]"
    cluster.kill_node("n2")
    assert_continued(project, process)
    (again,) = cluster.jobs(JobId=job["JobId"])
    assert (again["Restarts"], again["NodeList"]) == ("1", "n[1,3]")
