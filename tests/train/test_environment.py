"""Variables of torchrun and srun that identify a rank."""

import os

import pytest

from shardlab.core.errors import UserError
from shardlab.train.launch import launch
from shardlab.train.launch_environment import RankEnvironment, first_host, rank_environment

TASK = {
    "JOB_ID": 7001,
    "STEP_ID": 0,
    "STEP_NODELIST": "gpu[03-04]",
    "STEP_NUM_NODES": 2,
    "STEP_NUM_TASKS": 4,
    "PROCID": 3,
    "NODEID": 1,
    "LOCALID": 1,
}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)


@pytest.fixture
def variables(monkeypatch):
    def variables(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return variables


@pytest.fixture
def srun(variables):
    def srun(**changes):
        variables(**{f"SLURM_{name}": value for name, value in (TASK | changes).items()})

    return srun


def test_variables_of_torchrun_are_read(variables):
    assert rank_environment(4) is None
    variables(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, **MASTER)
    assert rank_environment(4) == RankEnvironment(3, 4, 1, 2, "node0", 29500)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"WORLD_SIZE": 3, **MASTER}, r"torchrun started 3 ranks, train\.world_size says 2"),
        ({"WORLD_SIZE": 2}, "MASTER_ADDR and MASTER_PORT are not: unset those"),
    ],
)
def test_ranks_that_cannot_join_are_refused(variables, values, message):
    variables(RANK=0, **values)
    with pytest.raises(UserError, match=message):
        rank_environment(2)


def test_max_restarts_that_cannot_be_done_are_refused(variables):
    with pytest.raises(UserError, match=r"^--max-restarts -1: expected 0 or more$"):
        launch(lambda group: None, 2, 1, timeout_s=5, max_restarts=-1)
    variables(RANK=0, WORLD_SIZE=2, **MASTER)
    with pytest.raises(UserError, match=r"^--max-restarts: give it to torchrun"):
        launch(lambda group: None, 2, 1, timeout_s=5, max_restarts=1)


def test_variables_of_srun_are_mapped_to_those_of_torchrun(srun, variables):
    srun()
    place = rank_environment(4)
    assert place is not None
    assert place == RankEnvironment(3, 4, 1, 2, "gpu03", place.master_port)
    assert 1024 < place.master_port < 32768, "the kernel gives ports above to anybody"
    variables(**MASTER)
    assert rank_environment(4) == RankEnvironment(3, 4, 1, 2, "node0", 29500)


def test_one_command_starts_all_ranks_without_a_task_for_each(srun, variables):
    """srun was forgotten; or it has one task, as Snakemake starts its jobs in SLURM."""
    variables(SLURM_NTASKS=4, SLURM_JOB_ID=0, SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_NODEID=0)
    assert rank_environment(4) is None
    srun(STEP_NUM_TASKS=1, STEP_NUM_NODES=1, PROCID=0, NODEID=0, LOCALID=0)
    assert rank_environment(4) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # distributed cyclically; two and one
        ({"PROCID": 1, "NODEID": 1, "LOCALID": 0}, "give --ntasks-per-node and --distribution="),
        ({"STEP_NUM_TASKS": 3, "PROCID": 2, "LOCALID": 0}, "give --ntasks-per-node and --dist"),
    ],
)
def test_unequal_or_cyclic_task_distribution_is_refused(srun, changes, message):
    srun(**changes)
    with pytest.raises(UserError, match=message):
        rank_environment(4)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-07,9],login1", "gpu03"),
        ("rack1-n[01-02]-ib,x", "rack1-n01-ib"),
        ("a,b[1-2]", "a"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host
