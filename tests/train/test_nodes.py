"""Ranks of several nodes join, fail and restart together, under torchrun's agents or srun."""

import re
import socket
from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from shardlab.train.launch import Worker, launch
from tests.commands import Command, agents, free_port, launching, wait_for
from tests.train.workers import (
    adds_up,
    dies_at_first,
    mistaken,
    one_fails,
    raising,
    sums_for_ever,
)


def join(commands: list[Command]) -> list[int]:
    """Return the exit codes; no process is left."""
    codes = [command.wait(120) for command in commands]
    for command in commands:
        wait_for(lambda command=command: not command.family())
    return codes


def srun(folder: Path, worker: Worker, count: int) -> list[Command]:
    """Start the tasks that srun would start, two on each node, all of them on this machine."""
    step = {
        # a batch script that asked for more has these as well
        "SLURM_NTASKS": str(count + 1),
        "SLURM_JOB_ID": "7001",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NUM_NODES": str(count // 2),
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "MASTER_PORT": str(free_port()),
    }
    commands = []
    for rank in range(count):
        own = {"PROCID": rank, "NODEID": rank // 2, "LOCALID": rank % 2}
        variables = step | {f"SLURM_{key}": str(value) for key, value in own.items()}
        task = folder / f"task{rank}"
        commands.append(launching(task, worker, count, environment=variables))
    return commands


@pytest.mark.parametrize("start", [agents, srun])
def test_ranks_of_several_nodes_form_one_process_group(tmp_path, start):
    commands = start(tmp_path, adds_up(tmp_path), 4)
    assert {*join(commands)} == {0}, commands[0].said()
    results = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    # agents become nodes in the order in which they come
    assert results == ["6 0/2", "6 1/2"] * 2


def test_an_error_ends_all_nodes_and_is_named(tmp_path):
    commands = agents(tmp_path, one_fails(3, raising(ValueError("on purpose"))), 4)
    assert join(commands) == [1, 1]
    said = "".join(command.said() for command in commands)
    assert "error: crash: rank 3: Traceback" in said and "ValueError: on purpose" in said


@pytest.mark.long
def test_nodes_end_with_a_killed_node(tmp_path):
    commands = agents(tmp_path, sums_for_ever(tmp_path), 4)
    wait_for(lambda: len([*tmp_path.glob("started.*")]) == 4)
    commands[1].kill()
    assert join(commands)[0] == 1


@pytest.mark.long
def test_nodes_restart_together(tmp_path):
    commands = agents(tmp_path, dies_at_first(3, tmp_path), 4, max_restarts=2)
    assert join(commands) == [0, 0], commands[0].said()
    found = sorted(path.name for path in tmp_path.glob("?.?"))
    assert found == [f"{attempt}.{rank}" for attempt in range(2) for rank in range(4)]


def test_a_mistake_of_the_user_is_one_line(tmp_path):
    commands = srun(tmp_path, one_fails(1, lambda: mistaken(None)), 2)
    assert sorted(join(commands)) == [1, 2]
    said = "".join(command.said() for command in commands)
    # of the other rank torch says that a connection was lost
    assert "error: train.steps: too many\n" in said and "Traceback" not in said


@pytest.mark.long
def test_missing_tasks_are_named(tmp_path):
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = str(free_port())
    command = launching(tmp_path, mistaken, 3, 1, variables)
    assert join([command]) == [1]
    assert "TimeoutError: rank 1, rank 2 did not join within the time-out" in command.said()


def test_a_port_in_use_is_reported(tmp_path):
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("", 0)) as other:  # which says nothing to who connects
        variables["MASTER_PORT"] = port = str(other.getsockname()[1])
        ranks = [
            launching(tmp_path / rank, mistaken, 2, 2, variables | {"RANK": rank}) for rank in "01"
        ]
        assert join(ranks) == [2, 1]
    assert f"error: port {port} is in use: choose another in MASTER_PORT\n" in ranks[0].said()
    said = "error: timeout: rank 1: rank 0 does not answer at MASTER_ADDR 127.0.0.1, MASTER_PORT"
    assert f"{said} {port}" in ranks[1].said() and "Traceback" not in ranks[1].said()


@pytest.mark.parametrize("name", ["^lo", "10.0.0.1"])
def test_a_wrong_network_interface_is_named(name, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    with pytest.raises(UserError, match=f"^GLOO_SOCKET_IFNAME is '{re.escape(name)}': name a"):
        launch(lambda group: None, 1, 1, timeout_s=30)
