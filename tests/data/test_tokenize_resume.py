"""Token shards: what a killed build leaves is used by the next, which ends with the same bytes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import write_corpus
from shardlab.data.sources import generate
from shardlab.data.workers import worker_pool

BUILD = """
import sys
from pathlib import Path
from shardlab.data.settings import Tokenize
from shardlab.data.tokenize import build_tokens
options = Tokenize(tokenizer="train", vocabulary=300, shards=int(sys.argv[1]))
build_tokens(Path("corpus.json"), 0.05, options, Path("work"), Path("data"))
"""


def start(folder: Path, shards: int = 12) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", BUILD, str(shards)]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)


def prepare(folder: Path) -> Path:
    write_corpus(folder / "corpus.json", generate(1500))
    return folder


def receipts(folder: Path) -> dict[Path, int]:
    """Return the times at which the shards of a build that has not ended were finished."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("work/tokenize/*/train-*.json")}


def outputs(folder: Path) -> dict[str, bytes]:
    files = [path for path in (folder / "data").rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.long
def test_killed_builds_resume_to_the_same_bytes(tmp_path_factory):
    calm, killed = (prepare(tmp_path_factory.mktemp(name)) for name in ("calm", "killed"))
    assert start(calm).wait(120) == 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        before = receipts(killed)
        build, end = start(killed), time.monotonic() + 120
        while len(receipts(killed)) <= len(before) and time.monotonic() < end:
            time.sleep(0.01)
        build.send_signal(number)
        assert build.wait(120) != 0
        assert before.items() <= receipts(killed).items()  # none is built again
        assert not outputs(killed)
    assert start(killed).wait(120) == 0
    assert outputs(killed) == outputs(calm)
    assert not any((killed / "work").iterdir())
    assert start(killed, shards=2).wait(120) == 0
    names = sorted(path.name for path in (killed / "data" / "tokens").iterdir())
    assert names == ["manifest.json", "train-0.bin", "train-1.bin", "validation.bin"]


def test_a_killed_worker_is_one_line():
    with (
        pytest.raises(UserError, match=r"a worker process was killed, .* run this stage again"),
        worker_pool(1) as pool,
    ):
        pool.submit(signal.raise_signal, signal.SIGKILL).result()
