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


def test_without_a_launcher_all_ranks_are_local():
    assert rank_environment(4) is None


def test_variables_of_torchrun_are_read(variables):
    variables(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, **MASTER)
    assert rank_environment(4) == RankEnvironment(3, 4, 1, 2, "node0", 29500)


def test_another_number_of_ranks_is_refused(variables):
    variables(RANK=0, WORLD_SIZE=3, **MASTER)
    with pytest.raises(UserError, match=r"torchrun started 3 ranks, train\.world_size says 2"):
        rank_environment(2)


def test_ranks_of_an_unknown_launcher_are_refused(variables):
    variables(RANK=0, WORLD_SIZE=2)
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT are not: unset those"):
        rank_environment(2)


def test_max_restarts_is_refused_under_torchrun(variables):
    variables(RANK=0, WORLD_SIZE=2, **MASTER)
    with pytest.raises(UserError, match=r"^--max-restarts: give it to torchrun"):
        launch(lambda group: None, 2, 1, timeout_s=5, max_restarts=1)


def test_negative_max_restarts_is_refused():
    with pytest.raises(UserError, match=r"^--max-restarts -1: expected 0 or more$"):
        launch(lambda group: None, 2, 1, timeout_s=5, max_restarts=-1)


def test_variables_of_srun_are_mapped_to_those_of_torchrun(srun):
    srun()
    found = rank_environment(4)
    assert found is not None
    assert found == RankEnvironment(3, 4, 1, 2, "gpu03", found.master_port)
    assert 1024 < found.master_port < 32768, "the kernel gives ports above to anybody"


def test_master_address_of_the_user_precedes_that_of_slurm(srun, variables):
    srun()
    variables(**MASTER)
    found = rank_environment(4)
    assert (found.master_addr, found.master_port) == ("node0", 29500)


def test_one_task_for_several_ranks_is_refused(srun):
    srun()
    with pytest.raises(UserError, match=r"srun started 4 ranks, train\.world_size says 8"):
        rank_environment(8)


def test_batch_script_without_srun_starts_all_ranks(variables):
    """srun was forgotten, or starts the ranks of another program."""
    names = ("JOB_ID", "PROCID", "LOCALID", "NODEID")
    variables(SLURM_NTASKS=4, **{f"SLURM_{name}": 0 for name in names})
    assert rank_environment(4) is None


def test_a_step_of_one_task_starts_all_ranks(srun):
    """As Snakemake starts its jobs in SLURM."""
    srun(STEP_NUM_TASKS=1, STEP_NUM_NODES=1, PROCID=0, NODEID=0, LOCALID=0)
    assert rank_environment(4) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"PROCID": 1, "NODEID": 1, "LOCALID": 0},  # distributed cyclically
        {"STEP_NUM_TASKS": 3, "PROCID": 2, "LOCALID": 0},  # two and one
    ],
)
def test_unequal_or_cyclic_task_distribution_is_refused(srun, changes):
    srun(**changes)
    with pytest.raises(UserError, match="give --ntasks-per-node and --distribution=block"):
        rank_environment(4)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("gpu[03-07,9],login1", "gpu03"),
        ("gpu[3,5]", "gpu3"),
        ("rack1-n[01-02]-ib,x", "rack1-n01-ib"),
        ("a,b[1-2]", "a"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host
