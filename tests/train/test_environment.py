"""Variables of torchrun and srun that identify a rank."""

import os

import pytest

from shardlab.core.errors import UserError
from shardlab.core.launch_environment import RankEnvironment, is_first_rank, rank_environment
from shardlab.train.launch import launch

TORCHRUN = {
    "RANK": 3,
    "WORLD_SIZE": 4,
    "LOCAL_RANK": 1,
    "LOCAL_WORLD_SIZE": 2,
    "MASTER_ADDR": "node0",
    "MASTER_PORT": 29500,
}
SRUN = {
    "SLURM_JOB_ID": 7001,
    "SLURM_STEP_ID": 0,
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_NODES": 2,
    "SLURM_STEP_NUM_TASKS": 4,
    "SLURM_PROCID": 3,
    "SLURM_NODEID": 1,
    "SLURM_LOCALID": 1,
}
MASTER = {name: TORCHRUN[name] for name in ("MASTER_ADDR", "MASTER_PORT")}


@pytest.fixture
def variables(monkeypatch):
    """Set variables, and no others of a launcher."""
    launchers = ("SLURM_", "TORCHELASTIC_", *TORCHRUN)
    for name in [name for name in os.environ if name.startswith(launchers)]:
        monkeypatch.delenv(name)

    def variables(values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return variables


@pytest.mark.parametrize("given", [TORCHRUN, SRUN | MASTER], ids=["torchrun", "srun"])
def test_variables_of_launchers_are_read(variables, given):
    variables(given)
    assert rank_environment(4) == RankEnvironment(3, 4, 1, 2, "node0", 29500)
    assert not is_first_rank()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-07,9],login1", "gpu03"),
        ("rack1-n[01-02]-ib,x", "rack1-n01-ib"),
        ("a,b[1-2]", "a"),
    ],
)
def test_the_first_node_of_srun_hosts_the_store(variables, nodes, host):
    variables(SRUN | {"SLURM_STEP_NODELIST": nodes})
    place = rank_environment(4)
    assert place is not None and place.master_addr == host
    assert 1024 < place.master_port < 32768, "the kernel gives ports above to anybody"


ONE_TASK = {"STEP_NUM_TASKS": 1, "STEP_NUM_NODES": 1, "PROCID": 0, "NODEID": 0, "LOCALID": 0}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"RANK": 1},
        {"SLURM_NTASKS": 4, "SLURM_JOB_ID": 0, "SLURM_PROCID": 0},  # srun was forgotten
        # as Snakemake starts its jobs in SLURM
        SRUN | {f"SLURM_{name}": value for name, value in ONE_TASK.items()},
    ],
)
def test_one_command_starts_all_ranks_without_a_task_for_each(variables, given):
    variables(given)
    assert rank_environment(4) is None
    assert is_first_rank(), "of the lock: nobody else starts here"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (TORCHRUN | {"WORLD_SIZE": 3}, r"torchrun started 3 ranks, train\.world_size says 4"),
        ({"RANK": 0, "WORLD_SIZE": 4}, "but not MASTER_ADDR and MASTER_PORT: unset RANK"),
        (TORCHRUN | {"RANK": "x"}, "^RANK is 'x': expected a whole number, at least 0$"),
        (TORCHRUN | {"RANK": 4}, "^RANK 4 of 4, LOCAL_RANK 1 of 2: count ranks from 0"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": 0}, "^LOCAL_WORLD_SIZE is '0': expected .* least 1$"),
        (TORCHRUN | {"MASTER_PORT": 70000}, "^MASTER_PORT 70000: choose a port below 65536$"),
        ({"SLURM_STEP_NUM_TASKS": 4}, "^SLURM_STEP_NUM_NODES is not set beside other variables"),
        (
            {key: value for key, value in SRUN.items() if key != "SLURM_STEP_NODELIST"},
            "^SLURM_STEP_NODELIST is not set beside",
        ),
        # distributed cyclically; two and one
        (SRUN | {"SLURM_PROCID": 1, "SLURM_LOCALID": 0}, "--ntasks-per-node and --distribution="),
        (SRUN | {"SLURM_STEP_NUM_TASKS": 3, "SLURM_PROCID": 2}, "give --ntasks-per-node and"),
    ],
)
def test_ranks_that_cannot_join_are_refused(variables, given, message):
    variables(given)
    with pytest.raises(UserError, match=message):
        rank_environment(4)


def test_max_restarts_that_cannot_be_done_are_refused(variables):
    for given, restarts, message in (({}, -1, "expected 0 or more"), (TORCHRUN, 1, "torchrun")):
        variables(given)
        with pytest.raises(UserError, match=rf"^--max-restarts.*{message}"):
            launch(lambda group: None, 4, 1, timeout_s=5, max_restarts=restarts)
