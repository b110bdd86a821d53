"""Ranks of several nodes join, fail and restart together, under torchrun's agents or srun."""

import dataclasses
import json
import os
import signal
import socket
import threading
import time

import pytest
import torch.distributed as dist

from shardlab.train import stores
from shardlab.train.launch_environment import RankEnvironment
from shardlab.train.rank_failure import Failure
from shardlab.train.stores import TcpAttempt
from tests.commands import (
    Command,
    agents,
    forked,
    free_port,
    launching,
    spawned,
    torchrun,
    wait_for,
)
from tests.train.workers import (
    adds_up,
    dies_at_first,
    mistaken,
    one_dies,
    one_raises,
    pids,
    sums_for_ever,
)


def join(commands: list[Command]) -> list[int]:
    """Return the exit codes; no process is left."""
    codes = [command.wait(120) for command in commands]
    for command in commands:
        wait_for(lambda command=command: not command.family())
    return codes


def assert_attempts(folder, world_size):
    """There were two attempts, by all ranks."""
    found = sorted(path.name for path in folder.glob("?.?"))
    assert found == [f"{attempt}.{rank}" for attempt in range(2) for rank in range(world_size)]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_nodes_form_one_process_group(tmp_path, count):
    commands = agents(tmp_path, adds_up(tmp_path), 2 * count, count)
    assert join(commands) == [0] * count, commands[0].said()
    total = sum(range(2 * count))
    results = [(tmp_path / str(rank)).read_text() for rank in range(2 * count)]
    # agents become nodes in the order in which they come
    assert results == [f"{total} 0/2", f"{total} 1/2"] * count


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 3])
def test_the_first_error_of_all_nodes_is_reported_by_each(tmp_path, rank):
    """The others' ranks lose their connections within the same milliseconds."""
    commands = agents(tmp_path, one_raises(rank, ValueError("on purpose")), 4)
    assert join(commands) == [1, 1]
    output = "".join(command.said() for command in commands)
    assert f"RunFailed: crash: rank {rank}: Traceback" in output
    for command in commands:
        assert f"ends, too: rank {rank}: ValueError: on purpose\n" in command.said()
        assert "onnection closed" not in command.said()


@pytest.mark.long
def test_each_node_names_the_killed_rank(tmp_path):
    commands = agents(tmp_path, one_dies(2), 4)
    assert join(commands) == [1, 1]
    assert all("rank 2 was killed by signal 9" in each.said() for each in commands)


@pytest.mark.long
def test_a_stopped_rank_of_another_node_is_named(tmp_path):
    commands = agents(tmp_path, one_dies(1, signal.SIGSTOP), 2, timeout_s=2)
    assert join(commands) == [1, 1]
    assert all("rank 1: stopped by a signal" in command.said() for command in commands)


@pytest.mark.long
def test_ranks_without_communication_end_with_a_failed_rank(tmp_path):
    def worker(group):
        if dist.get_rank(group) == 0:
            raise ValueError("on purpose")
        time.sleep(120)

    commands = agents(tmp_path, worker, 2)
    assert join(commands) == [1, 1]
    assert "ends, too: rank 0: ValueError: on purpose" in "".join(c.said() for c in commands)


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.long), 1])
def test_nodes_end_with_a_killed_node(tmp_path, killed):
    commands = agents(tmp_path, sums_for_ever(tmp_path), 4)
    wait_for(lambda: pids(tmp_path, 4) is not None)
    commands[killed].kill()
    codes = join(commands)
    assert codes[1 - killed] == 1


@pytest.mark.long
def test_ranks_of_a_killed_node_are_named(tmp_path):
    commands = agents(tmp_path, sums_for_ever(tmp_path), 4)
    wait_for(lambda: pids(tmp_path, 4) is not None)
    here = set(pids(tmp_path, 4)) & set(commands[1].family())
    ranks = [rank for rank, pid in enumerate(pids(tmp_path, 4)) if pid in here]
    # the rendezvous of torchrun ends with the agent that hosts it: see the test above
    hosting = 0 in ranks
    if hosting:
        pytest.skip("agent 1 came first")
    commands[1].kill()
    join(commands)
    names = ", ".join(map(str, ranks))
    assert f"no report from rank {names}: rank" in commands[0].said()


@pytest.mark.long
def test_nodes_restart_together(tmp_path):
    commands = agents(tmp_path, dies_at_first(3, tmp_path), 4, max_restarts=2)
    assert join(commands) == [0, 0], commands[0].said()
    assert_attempts(tmp_path, 4)


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


@pytest.mark.parametrize(("tasks", "ranks_here"), [([1, 1], 1), ([2, 2], 2), ([3], 3)])
def test_tasks_of_srun_join(tmp_path, tasks, ranks_here):
    commands = srun(tmp_path, adds_up(tmp_path), tasks)
    assert join(commands) == [0] * len(commands), commands[0].said()
    total = sum(range(len(commands)))
    results = [(tmp_path / str(rank)).read_text() for rank in range(len(commands))]
    expected = [f"{total} {rank % ranks_here}/{ranks_here}" for rank in range(len(commands))]
    assert results == expected


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_tasks_of_srun_name_the_killed_rank(tmp_path, rank):
    commands = srun(tmp_path, one_dies(rank), [1, 1])
    assert join(commands) == [1, 1]
    assert all(f"rank {rank} was killed by signal 9" in each.said() for each in commands)


@pytest.mark.long
def test_a_mistake_of_the_user_is_one_line_on_each_node(tmp_path):
    first, second = sorted(srun(tmp_path, mistaken, [1, 1]), key=lambda each: each.wait(60))
    assert "train.steps: too many\n" in first.said()
    assert "train.steps: too many\n" in second.said()
    assert second.said() == "error: train.steps: too many\n"
    assert (first.said().count("\n"), second.wait()) == (1, 2)


def environment_of(rank: int, world_size: int, port: int | None = None) -> dict[str, str]:
    """Variables of one rank of torchrun, with a free port unless one is given."""
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}


@pytest.mark.long
def test_missing_tasks_are_named(tmp_path):
    command = launching(tmp_path, mistaken, 3, 1, environment_of(0, 3))
    assert join([command]) == [1]
    assert "TimeoutError: rank 1, 2 did not join within the time-out" in command.said()


def test_missing_rank_0_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_CONNECT_S", 1.0)
    command = launching(tmp_path, mistaken, 2, 1, environment_of(1, 2))
    assert join([command]) == [1]
    assert "RunFailed: crash: rank 1: " in command.said()


def test_a_port_in_use_is_reported(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        command = launching(tmp_path, mistaken, 2, 30, environment_of(0, 2, port))
        assert join([command]) == [2]
    assert f"error: port {port} is in use: choose another in MASTER_PORT\n" in command.said()


def test_strangers_end_no_run_and_reach_one_interface_alone(tmp_path):
    """Silent connections and hostile frames before and during the run (attack 15 of the review)."""
    port = free_port()
    leader = launching(tmp_path / "a", adds_up(tmp_path), 2, 30, environment_of(0, 2, port))
    strangers = []

    def connected(host="127.0.0.1") -> bool:
        try:
            strangers.append(socket.create_connection((host, port)))
        except ConnectionRefusedError:
            return False
        return True

    wait_for(connected)
    assert not connected("127.0.0.2"), "it listens on all interfaces"
    # the first bytes that the store expects, then each of its queries with absurd lengths
    greeting = b"\0" + 0x3C85F7CE.to_bytes(4, "little")
    lengths = [length.to_bytes(8, "little") for length in (2**40, 2**63, 2**64 - 1)]
    frames = [greeting + bytes([query]) + length for query in range(1, 20) for length in lengths]
    for frame in [b"GET / HTTP/1.1\r\n\r\n", bytes(400), b"\xff" * 400, b"", *frames] * 3:
        assert connected()
        strangers[-1].sendall(frame)
    other = launching(tmp_path / "b", adds_up(tmp_path), 2, 30, environment_of(1, 2, port))
    assert join([leader, other]) == [0, 0], leader.said()
    for stranger in strangers:
        stranger.close()


@pytest.mark.long
def test_reports_that_no_rank_wrote_are_ignored():
    """One was a TypeError in every process (attack 15 of the review)."""
    reports = ["", "{", "3", "{}", '{"kind": "crash", "summary": "x", "order": "first"}']
    own = Failure("crash", "rank 0: on purpose", order=1, attempt="this")
    place = RankEnvironment(0, 1 + len(reports), 0, 1, "127.0.0.1", free_port())
    with TcpAttempt(place) as attempt:
        attempt.serve()
        store = dist.TCPStore("127.0.0.1", place.master_port, wait_for_workers=False)
        for rank, report in enumerate(reports, 1):
            dist.PrefixStore("this/failures", store).set(str(rank), report)
        assert str(attempt.reported(own)) == "crash: rank 0: on purpose"


@pytest.mark.parametrize("reports", [True, False])
def test_the_first_failure_is_waited_for_where_its_rank_may_still_report_it(monkeypatch, reports):
    """Rank 2 has failed first; if it was killed meanwhile, rank 1 has to name it."""
    monkeypatch.setattr(stores, "_EARLIER_REPORT_S", 1.0)
    first, second, own = (
        Failure("crash", f"rank {rank}: on purpose", order=order, attempt="this")
        for order, rank in enumerate((2, 1, 0), 1)
    )
    place = RankEnvironment(0, 3, 0, 1, "127.0.0.1", free_port())
    with TcpAttempt(place) as attempt:
        attempt.serve()
        store = dist.TCPStore("127.0.0.1", place.master_port, wait_for_workers=False)
        known = dist.PrefixStore("this/failures", store)
        known.set("1", json.dumps(dataclasses.asdict(second)))
        late = threading.Timer(0.3, known.set, ("2", json.dumps(dataclasses.asdict(first))))
        if reports:
            late.start()
        assert attempt._first_of_all(own) == (first if reports else second)


ONE = ("--standalone", "--nproc-per-node=2")


def test_ranks_of_two_nodes_join(tmp_path):
    """With a fixed address, which needs no rendezvous between the agents."""
    port = str(free_port())
    options = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port", port]
    lines = [
        torchrun(tmp_path, "workers.adds_up(folder)", 4, *options, f"--node-rank={node}")
        for node in range(2)
    ]
    commands = [forked(tmp_path / f"node{node}", line) for node, line in enumerate(lines)]
    assert join(commands) == [0, 0], [command.said() for command in commands]
    sums = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert sums == ["6 0/2", "6 1/2", "6 0/2", "6 1/2"]


@pytest.mark.long
def test_torchrun_reports_the_first_error_once(tmp_path):
    worker = "workers.one_raises(1, ValueError('on purpose'))"
    agent = forked(tmp_path / "agent", torchrun(tmp_path, worker, 2, *ONE))
    assert join([agent]) != [0]
    assert agent.said().count("RunFailed: crash: rank 1: Traceback") == 1
    assert "rank 0 ends, too: rank 1: ValueError: on purpose" in agent.said()
    assert "onnection closed" not in agent.said()


@pytest.mark.parametrize("by", [forked, pytest.param(spawned, marks=pytest.mark.long)])
def test_a_killed_rank_is_named_and_restarted(tmp_path, by):
    """torch alone fails here: its second attempt finds the addresses of the first."""
    worker = "workers.dies_at_first(1, folder)"
    agent = by(tmp_path / "agent", torchrun(tmp_path, worker, 2, *ONE, "--max-restarts=1"))
    assert join([agent]) == [0], agent.said()
    # torch writes what a forked process raises to the log of the tests
    report = "rank 0 ends, too: " if by is forked else "RunFailed: memory: "
    assert agent.said().count(f"{report}rank 1 was killed by signal 9") == 1
    assert_attempts(tmp_path, 2)


def test_no_rank_outlives_a_killed_torchrun(tmp_path):
    agent = forked(tmp_path / "agent", torchrun(tmp_path, "workers.sleeps(folder)", 2, *ONE))
    wait_for(lambda: pids(tmp_path, 2) is not None)
    agent.kill()
    join([agent])
