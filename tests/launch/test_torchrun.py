"""The command `torchrun` starts, ends and restarts ranks, which behave as forked ones do."""

import psutil

from tests.commands import free_port, said, start, torchrun, wait_for
from tests.launch.workers import pids

ONE = ("--standalone", "--nproc-per-node=2")


def test_ranks_of_two_nodes_join(tmp_path):
    """With a fixed address, which needs no rendezvous between the agents."""
    port = str(free_port())
    options = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port", port]
    agents = [
        start(torchrun(tmp_path, "workers.adds_up(folder)", 4, *options, "--node-rank", node))
        for node in "01"
    ]
    output = [said(agent) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], output
    sums = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert sums == ["6 0/2", "6 1/2", "6 0/2", "6 1/2"]


def test_the_first_error_is_reported_and_the_others_point_to_it(tmp_path):
    agent = start(torchrun(tmp_path, "workers.one_raises(1, ValueError('on purpose'))", 2, *ONE))
    output = said(agent)
    assert agent.returncode != 0
    assert output.count("RunFailed: crash: rank 1: Traceback") == 1
    assert "rank 0 ends, too: rank 1: ValueError: on purpose" in output
    assert "onnection closed" not in output


def test_a_killed_rank_is_named_and_restarted(tmp_path):
    """torch alone fails here: its second attempt finds the addresses of the first."""
    worker = "workers.dies_at_first(1, folder)"
    agent = start(torchrun(tmp_path, worker, 2, *ONE, "--max-restarts=1"))
    output = said(agent)
    assert agent.returncode == 0, output
    assert output.count("RunFailed: memory: rank 1 was killed by signal 9") == 1
    attempts = sorted(path.name for path in tmp_path.glob("?.?"))
    assert attempts == [f"{attempt}.{rank}" for attempt in range(2) for rank in range(2)]


def test_no_rank_outlives_a_killed_torchrun(tmp_path):
    agent = start(torchrun(tmp_path, "workers.sleeps(folder)", 2, *ONE))
    wait_for(lambda: pids(tmp_path, 2) is not None, 60)
    ranks = pids(tmp_path, 2)
    agent.kill()
    wait_for(lambda: not any(psutil.pid_exists(rank) for rank in ranks))
