"""Where a command stands among those of its run, from its options and its environment."""

import os

import pytest

from shardlab.core.errors import UserError
from shardlab.launch.place import Place, Start, find_place, first_host

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


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in [*(n for n in os.environ if n.startswith("SLURM_")), "RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def srun(monkeypatch):
    def srun(**changes):
        for name, value in (TASK | changes).items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))

    return srun


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (Start(nnodes=0), "--nnodes 0: a run has one node or more"),
        (
            Start(nnodes=2, node_rank=2, master="a:1"),
            "--node-rank 2: expected 0 or more, and less than --nnodes (2)",
        ),
        (
            Start(node_rank=-1),
            "--node-rank -1: expected 0 or more, and less than --nnodes (1)",
        ),
        (
            Start(nnodes=2),
            "--nnodes needs --master HOST:PORT of node 0, the same on every node",
        ),
        (
            Start(master="a:1"),
            "--master is for several nodes: give --nnodes and --node-rank too",
        ),
        *(
            (
                Start(nnodes=2, master=text),
                f"--master {text}: expected HOST:PORT, for example node1:29500",
            )
            for text in ("a", "a:", ":1", "a:b", "a:0", "a:65536", "a:-1")
        ),
        (
            Start(nnodes=4, master="a:1"),
            "train.world_size: 6 ranks cannot be shared equally by 4 nodes: choose a multiple",
        ),
        (Start(max_restarts=-1), "--max-restarts -1: expected 0 or more"),
    ],
)
def test_a_mistake_is_answered_with_the_mend(start, told):
    with pytest.raises(UserError) as error:
        find_place(6, start)
    assert str(error.value) == told


def test_ranks_of_an_unknown_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT are not: unset those"):
        find_place(2, Start())


def test_options_say_it():
    expected = Place(3, 1, master=("fe80::1", 29500))
    assert find_place(6, Start(3, 1, "fe80::1:29500")) == expected


def test_a_step_of_slurm_says_it(srun):
    srun()
    place = find_place(8, Start())
    assert place == Place(4, 3, 2, 1, place.master, "task")
    assert place.master is not None and place.master[0] == "gpu03"
    assert 1024 < place.master[1] < 32768, "the kernel gives ports above to anybody"


def test_steps_of_one_job_have_ports_of_their_own(srun):
    ports = set()
    for step in range(20):
        srun(STEP_ID=step)
        ports.add(find_place(4, Start()).master)
    assert len(ports) == 20


def test_options_come_before_slurm(srun):
    srun()
    assert find_place(4, Start(master="other:29500")).master == ("other", 29500)
    assert find_place(4, Start(2, 1, "a:1")) == Place(2, 1, master=("a", 1))


def test_a_batch_script_is_one_command(monkeypatch):
    """srun was forgotten, or starts the ranks of another program."""
    for name in ("JOB_ID", "PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert find_place(4, Start()) == Place()


@pytest.mark.parametrize(
    "changes",
    [
        {"PROCID": 1, "NODEID": 1, "LOCALID": 0},  # dealt out in turns
        {"STEP_NUM_TASKS": 3, "PROCID": 2, "LOCALID": 0},  # two and one
    ],
)
def test_tasks_that_are_no_equal_blocks_are_refused(srun, changes):
    srun(**changes)
    with pytest.raises(UserError, match="give --ntasks-per-node and --distribution=block"):
        find_place(12, Start())


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
