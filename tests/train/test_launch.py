"""Ranks start, fail and die together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from shardlab.core.errors import UserError
from shardlab.train.gather import gather_bytes, gather_values
from shardlab.train.launch import RunFailed, launch

ROOT = Path(__file__).parents[2]


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_every_rank_runs_with_its_threads(tmp_path):
    def worker(group):
        name = f"{dist.get_rank(group)}-{dist.get_world_size(group)}-{torch.get_num_threads()}"
        (tmp_path / name).touch()

    launch(worker, 3, threads=1, timeout_s=30)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0-3-1", "1-3-1", "2-3-1"]


def test_values_and_bytes_of_all_ranks_arrive_in_order():
    def on_rank(group):
        rank = dist.get_rank(group)
        assert gather_values({"rank": rank}, group) == [{"rank": r} for r in range(3)]
        assert gather_bytes(b"x" * rank, group) == [b"", b"x", b"xx"]
        return {}

    run_ranks(3, on_rank)


def test_the_error_of_the_rank_that_failed_is_the_one_that_is_told():
    def worker(group):
        if dist.get_rank(group) == 1:
            raise ArithmeticError("wrong sum on purpose")
        dist.barrier(group)

    with pytest.raises(RunFailed, match=r"(?s)rank 1.*wrong sum on purpose") as caught:
        launch(worker, 2, threads=1, timeout_s=30)
    assert caught.value.kind == "crash"


def test_a_mistake_of_the_user_stays_one_line():
    def worker(group):
        raise UserError("train.steps: too many")

    with pytest.raises(UserError, match=r"^train.steps: too many$"):
        launch(worker, 2, threads=1, timeout_s=30)


def test_a_killed_rank_is_named_and_takes_the_others_along():
    def worker(group):
        if dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier(group)

    start = time.monotonic()
    with pytest.raises(RunFailed, match="rank 1 was killed by signal 9"):
        launch(worker, 3, threads=1, timeout_s=60)
    assert time.monotonic() - start < 30
    assert not [c for c in psutil.Process().children() if c.name().startswith("rank")]


def test_a_run_over_its_limit_is_ended():
    with pytest.raises(RunFailed, match=r"not done after 0\.5 s") as caught:
        launch(lambda group: time.sleep(60), 2, threads=1, timeout_s=60, limit_s=0.5)
    assert caught.value.kind == "timeout"


_SLEEPERS = """
import os, sys, time
from pathlib import Path
from shardlab.train.launch import launch
def worker(group):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(120)
launch(worker, 2, threads=1, timeout_s=60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_its_launcher(tmp_path, number):
    parent = subprocess.Popen([sys.executable, "-c", _SLEEPERS, str(tmp_path)], cwd=ROOT)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, timeout_s=60)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    parent.send_signal(number)
    parent.wait(20)
    wait_until(lambda: not any(psutil.pid_exists(rank) for rank in ranks))


_JOINED = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from shardlab.train.launch import launch
def worker(group):
    Path(sys.argv[1], f"{dist.get_rank(group)}.{os.getpid()}").touch()
    if len(sys.argv) > 2:
        import time; time.sleep(120)
launch(worker, 2, threads=1, timeout_s=60)
"""


def torchrun(script, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    return [*command, "--standalone", str(script), *map(str, arguments)]


def test_under_torchrun_the_ranks_join(tmp_path):
    script = tmp_path / "joined.py"
    script.write_text(_JOINED)
    marks = tmp_path / "marks"
    marks.mkdir()
    subprocess.run(torchrun(script, marks), cwd=ROOT, check=True, env=with_root(), timeout=120)
    assert sorted(path.stem for path in marks.iterdir()) == ["0", "1"]


def test_no_rank_outlives_a_killed_torchrun(tmp_path):
    script = tmp_path / "joined.py"
    script.write_text(_JOINED)
    marks = tmp_path / "marks"
    marks.mkdir()
    agent = subprocess.Popen(torchrun(script, marks, "sleep"), cwd=ROOT, env=with_root())
    wait_until(lambda: len(list(marks.iterdir())) == 2, timeout_s=60)
    ranks = [int(path.suffix[1:]) for path in marks.iterdir()]
    agent.kill()
    agent.wait(20)
    wait_until(lambda: not any(psutil.pid_exists(rank) for rank in ranks))


def with_root():
    return {**os.environ, "PYTHONPATH": str(ROOT)}
