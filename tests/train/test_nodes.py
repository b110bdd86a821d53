"""Ranks of several nodes join, fail and restart together, under torchrun's agents or srun."""

import os
import socket

import pytest

from tests.commands import (
    Command,
    agents,
    free_port,
    launching,
    wait_for,
)
from tests.train.workers import (
    adds_up,
    dies_at_first,
    mistaken,
    one_raises,
    pids,
    sleeps,
    sums_for_ever,
)


def join(commands: list[Command]) -> list[int]:
    """Return the exit codes; no process is left."""
    codes = [command.wait(120) for command in commands]
    for command in commands:
        wait_for(lambda command=command: not command.family())
    return codes


def test_nodes_form_one_process_group(tmp_path):
    commands = agents(tmp_path, adds_up(tmp_path), 4)
    assert join(commands) == [0, 0], commands[0].said()
    results = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    # agents become nodes in the order in which they come
    assert results == ["6 0/2", "6 1/2"] * 2


def test_an_error_ends_all_nodes_and_is_named(tmp_path):
    commands = agents(tmp_path, one_raises(3, ValueError("on purpose")), 4)
    assert join(commands) == [1, 1]
    output = "".join(command.said() for command in commands)
    assert "rank 3: ValueError: on purpose" in output


@pytest.mark.long
def test_nodes_end_with_a_killed_node(tmp_path):
    commands = agents(tmp_path, sums_for_ever(tmp_path), 4)
    wait_for(lambda: pids(tmp_path, 4) is not None)
    commands[1].kill()
    assert join(commands)[0] == 1


@pytest.mark.long
def test_nodes_restart_together(tmp_path):
    commands = agents(tmp_path, dies_at_first(3, tmp_path), 4, max_restarts=2)
    assert join(commands) == [0, 0], commands[0].said()
    found = sorted(path.name for path in tmp_path.glob("?.?"))
    assert found == [f"{attempt}.{rank}" for attempt in range(2) for rank in range(4)]


def test_no_rank_outlives_a_killed_agent(tmp_path):
    [agent] = agents(tmp_path, sleeps(tmp_path), 2, count=1)
    wait_for(lambda: pids(tmp_path, 2) is not None)
    agent.kill()
    join([agent])


def srun(folder, worker, tasks_of_nodes: list[int], timeout_s: float = 30) -> list[Command]:
    """Start the tasks that srun would start on these nodes, all of them on this machine."""
    count = sum(tasks_of_nodes)
    of_step = {
        # a batch script that asked for more has these as well
        "SLURM_NTASKS": str(count + 1),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(len(list(folder.iterdir()))),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NUM_NODES": str(len(tasks_of_nodes)),
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "MASTER_PORT": str(free_port()),
    }
    commands = []
    for node, tasks in enumerate(tasks_of_nodes):
        for local_rank in range(tasks):
            rank = str(len(commands))
            own = {"PROCID": rank, "NODEID": str(node), "LOCALID": str(local_rank)}
            variables = of_step | {f"SLURM_{key}": value for key, value in own.items()}
            task = folder / f"task{rank}"
            commands.append(launching(task, worker, count, timeout_s, environment=variables))
    return commands


def test_tasks_of_srun_join(tmp_path):
    commands = srun(tmp_path, adds_up(tmp_path), [2, 2])
    assert join(commands) == [0] * 4, commands[0].said()
    results = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert results == ["6 0/2", "6 1/2"] * 2


def test_a_mistake_of_the_user_is_one_line(tmp_path):
    commands = srun(tmp_path, mistaken, [1, 1])
    assert 2 in join(commands)
    said = "".join(command.said() for command in commands)
    # torch may say that a connection was lost
    assert "error: train.steps: too many\n" in said and "Traceback" not in said


def environment_of(rank: int, world_size: int, port: int | None = None) -> dict[str, str]:
    """Variables of one rank of torchrun, with a free port unless one is given."""
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}


@pytest.mark.long
def test_missing_tasks_are_named(tmp_path):
    command = launching(tmp_path, mistaken, 3, 1, environment_of(0, 3))
    assert join([command]) == [1]
    assert "TimeoutError: rank 1, rank 2 did not join within the time-out" in command.said()


def test_a_port_in_use_is_reported(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        command = launching(tmp_path, mistaken, 2, 30, environment_of(0, 2, port))
        assert join([command]) == [2]
    assert f"error: port {port} is in use: choose another in MASTER_PORT\n" in command.said()
