"""Commands of several nodes are one run: they begin, fail, begin again and end together."""

import os
import socket
import subprocess
from contextlib import ExitStack

import pytest

from shardlab.core.errors import UserError
from shardlab.experiment.link import Link
from shardlab.launch import Start, launch
from shardlab.transport.link_emulation import Links
from tests.commands import Command, free_port, launching, nodes, wait_for
from tests.launch.workers import (
    adds_up,
    dies_at_first,
    mistaken,
    one_dies,
    one_raises,
    pids,
    sleeps,
)


def join(commands: list[Command]) -> list[int]:
    """Exit codes, after which nothing is left."""
    codes = [command.wait() for command in commands]
    for command in commands:
        command.leaves_nothing()
    return codes


@pytest.mark.parametrize("count", [2, 3])
def test_nodes_are_one_world(tmp_path, count):
    commands = nodes(tmp_path, adds_up(tmp_path), 2 * count, count)
    assert join(commands) == [0] * count, commands[0].said()
    total = sum(range(2 * count))
    told = [(tmp_path / str(rank)).read_text() for rank in range(2 * count)]
    assert told == [f"{total} 0/2", f"{total} 1/2"] * count


def test_nodes_may_come_in_any_order(tmp_path):
    master = f"127.0.0.1:{free_port()}"
    late = launching(tmp_path / "node1", adds_up(tmp_path), 2, Start(2, 1, master))
    early = launching(tmp_path / "node0", adds_up(tmp_path), 2, Start(2, 0, master))
    assert join([early, late]) == [0, 0]


@pytest.mark.parametrize("rank", range(4))
def test_the_first_error_of_all_nodes_is_told_by_each(tmp_path, rank):
    """The others' ranks lose their connections within the same milliseconds."""
    commands = nodes(tmp_path, one_raises(rank, ValueError("wrong on purpose")), 4)
    assert join(commands) == [1, 1]
    for command in commands:
        assert f"RunFailed: crash: rank {rank}: Traceback" in command.said()
        assert "ValueError: wrong on purpose" in command.said()
        assert "onnection" not in command.said()


def test_a_mistake_of_the_user_is_one_line_on_each_node(tmp_path):
    commands = nodes(tmp_path, mistaken, 2)
    assert join(commands) == [2, 2]
    assert [command.said() for command in commands] == ["error: train.steps: too many\n"] * 2


@pytest.mark.parametrize("rank", [1, 2])
def test_each_node_names_the_killed_rank(tmp_path, rank):
    commands = nodes(tmp_path, one_dies(rank), 4)
    assert join(commands) == [1, 1]
    assert all(f"rank {rank} was killed by signal 9" in each.said() for each in commands)


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_no_node_outlives_another(tmp_path, killed):
    """Although no rank waits for another, and so none would notice."""
    commands = nodes(tmp_path, sleeps(tmp_path), 3, 3)
    wait_for(lambda: pids(tmp_path, 3) is not None)
    commands[killed].kill()
    codes = join(commands)
    assert [code for node, code in enumerate(codes) if node != killed] == [1, 1]
    others = [each.said() for node, each in enumerate(commands) if node != killed]
    assert all(f"node {killed} is gone" in said for said in others), others


def test_nodes_begin_again_together(tmp_path):
    commands = nodes(tmp_path, dies_at_first(3, tmp_path), 4, max_restarts=2)
    assert join(commands) == [0, 0], commands[0].said()
    attempts = sorted(path.name for path in tmp_path.glob("*.*"))
    assert attempts == [f"{attempt}.{rank}" for attempt in range(2) for rank in range(4)]
    told = "restart 1 of 2: rank 3 was killed by signal 9 (SIGKILL, out of memory?)\n"
    assert [command.said().count(told) for command in commands] == [1, 1]


def test_nobody_begins_again_without_a_node(tmp_path):
    commands = nodes(tmp_path, sleeps(tmp_path), 2, max_restarts=5)
    wait_for(lambda: pids(tmp_path, 2) is not None)
    commands[1].kill()
    assert join(commands)[0] == 1
    assert "restart 1" not in commands[0].said()


def test_a_node_that_does_not_come_is_named(tmp_path):
    master = f"127.0.0.1:{free_port()}"
    there = [launching(tmp_path / n, mistaken, 3, Start(3, int(n), master), 1) for n in "02"]
    assert join(there) == [2, 2]
    told = "error: node 1 did not come within 1 s: start it, too\n"
    assert [command.said() for command in there] == [told] * 2


def test_a_first_node_that_does_not_come_is_named(tmp_path):
    port = free_port()
    command = launching(tmp_path, mistaken, 2, Start(2, 1, f"127.0.0.1:{port}"), 1)
    assert join([command]) == [2]
    assert command.said() == (
        f"error: no answer from node 0 at 127.0.0.1:{port} within 1 s: "
        "start it, too, and give all the same --master\n"
    )


def test_a_host_that_does_not_exist_is_named(tmp_path):
    command = launching(tmp_path, mistaken, 2, Start(2, 1, "no-such.invalid:29500"))
    assert join([command]) == [2]
    assert command.said() == "error: --master: there is no host 'no-such.invalid'\n"


def test_a_port_in_use_is_told(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        command = launching(tmp_path, mistaken, 2, Start(2, 0, f"127.0.0.1:{port}"))
        assert join([command]) == [2]
    assert command.said() == (
        f"error: cannot await the others at port {port} (address already in use): "
        "choose another in --master\n"
    )


def test_nodes_of_different_runs_are_told_apart(tmp_path):
    master = f"127.0.0.1:{free_port()}"
    commands = [
        launching(tmp_path / "0", mistaken, 2, Start(2, 0, master)),
        launching(tmp_path / "1", mistaken, 4, Start(2, 1, master)),
    ]
    assert join(commands) == [2, 2]
    told = "error: train.world_size is 4 on node 1 and 2 on node 0: make them equal\n"
    assert [command.said() for command in commands] == [told] * 2


def test_a_node_comes_once(tmp_path):
    master = f"127.0.0.1:{free_port()}"
    twins = [launching(tmp_path / n, adds_up(tmp_path), 3, Start(3, 1, master)) for n in "ab"]
    first = launching(tmp_path / "node0", adds_up(tmp_path), 3, Start(3, 0, master))
    wait_for(lambda: len([twin for twin in twins if twin.family()]) == 1)
    last = launching(tmp_path / "node2", adds_up(tmp_path), 3, Start(3, 2, master))
    refused, taken = sorted(twins, key=lambda twin: len(twin.said()), reverse=True)
    assert join([first, refused, taken, last]) == [0, 2, 0, 0]
    told = "error: node 1 is there already: give each node its own --node-rank\n"
    assert refused.said() == told


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b"\0\0\0\2[]", b""])
def test_strangers_at_the_port_disturb_nobody(tmp_path, words):
    port = free_port()
    master = f"127.0.0.1:{port}"
    first = launching(tmp_path / "node0", adds_up(tmp_path), 2, Start(2, 0, master))

    def visit() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(words)
            return True
        except ConnectionRefusedError:
            return False

    wait_for(visit)
    second = launching(tmp_path / "node1", adds_up(tmp_path), 2, Start(2, 1, master))
    assert join([first, second]) == [0, 0]


def test_a_stranger_in_the_place_of_the_first_node_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        command = launching(tmp_path, mistaken, 2, Start(2, 1, f"127.0.0.1:{port}"))
        with stranger.accept()[0] as visitor:
            visitor.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert join([command]) == [2]
    assert command.said() == (
        f"error: node 0 at 127.0.0.1:{port} has ended, or something else answers there\n"
    )


def srun(folder, worker, world_size: int, tasks_of_nodes: list[int]) -> list[Command]:
    """The tasks that srun would start on these nodes, all of them on this machine."""
    count = sum(tasks_of_nodes)
    of_step = {
        # a batch script that asked for more has these as well
        "SLURM_NTASKS": str(count + 1),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(len(list(folder.iterdir()))),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NUM_NODES": str(len(tasks_of_nodes)),
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    }
    commands = []
    for node, tasks in enumerate(tasks_of_nodes):
        for place in range(tasks):
            number = str(len(commands))
            own = {"PROCID": number, "NODEID": str(node), "LOCALID": str(place)}
            variables = of_step | {f"SLURM_{key}": value for key, value in own.items()}
            of_task = folder / f"task{number}"
            commands.append(launching(of_task, worker, world_size, environment=variables))
    return commands


@pytest.mark.parametrize(("tasks", "ranks_here"), [([1, 1], 2), ([2, 2], 2), ([2], 4)])
def test_tasks_of_srun_join(tmp_path, tasks, ranks_here):
    commands = srun(tmp_path, adds_up(tmp_path), 4, tasks)
    assert join(commands) == [0] * len(commands), commands[0].said()
    told = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert told == [f"6 {rank % ranks_here}/{ranks_here}" for rank in range(4)]


def test_one_task_of_srun_starts_all_ranks(tmp_path):
    """As Snakemake starts its jobs in SLURM."""
    assert join(srun(tmp_path, adds_up(tmp_path), 2, [1])) == [0]
    assert (tmp_path / "1").read_text() == "1 1/2"


def test_a_task_of_srun_that_is_gone_is_named_as_one(tmp_path):
    commands = srun(tmp_path, sleeps(tmp_path), 2, [1, 1])
    wait_for(lambda: pids(tmp_path, 2) is not None)
    commands[1].kill()
    assert join(commands)[0] == 1
    assert "task 1 is gone" in commands[0].said()


@pytest.mark.long
def test_nobody_waits_long_for_a_machine_that_has_vanished(tmp_path):
    """Its connections are not closed, they just fall silent."""
    with ExitStack() as stack:
        try:
            links = stack.enter_context(Links(2, Link(rate="1gbit")))
        except UserError as error:
            pytest.skip(str(error))
        commands = [Command(tmp_path / f"node{n}", on_link(tmp_path, links, n)) for n in (0, 1)]
        wait_for(lambda: pids(tmp_path, 2) is not None)
        cut = Command(tmp_path / "cut", lambda: cut_off(links, 1))
        assert cut.wait() == 0, cut.said()
        assert [command.wait(60) for command in commands] == [1, 1]
    assert [each.said().count("is gone") for each in commands] == [1, 1]


def on_link(folder, links, node):
    """A command of two nodes, on a link of its own; its ranks do nothing."""

    def call() -> None:
        links.enter(node)
        subprocess.run(["ip", "link", "set", "dev", "lo", "up"], check=True)
        start = Start(2, node, "198.18.0.1:29500")
        launch(sleeps(folder), 2, 1, timeout_s=60, start=start)

    return call


def cut_off(links, node) -> None:
    interface = links.enter(node)
    subprocess.run(["ip", "link", "set", "dev", interface, "down"], check=True)
