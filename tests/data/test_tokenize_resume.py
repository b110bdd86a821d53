"""Stage tokenize: what a killed one leaves is used by the next, which ends with the same bytes."""

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

import stages.tokenize  # noqa: F401 - imported once, before the commands are forked
from shardlab.data.corpus_file import write_corpus
from shardlab.data.sources import generate
from tests.commands import Command, typed, wait_for

PARAMS = """
data: {source: synthetic, validation_share: 0.05}
model: {preset: tiny}
tokenize: {tokenizer: train, vocabulary: 300, shards: 12}
"""
GIVEN = ("corpus.json", "source.json")


def start(folder: Path) -> Command:
    return typed(folder / f"command{len(list(folder.iterdir()))}", folder, "stages.tokenize")


def finish(folder: Path) -> None:
    stage = start(folder)
    assert stage.wait(120) == 0, stage.said()


def kill(folder: Path, by_worker: bool, number: signal.Signals) -> Command:
    """Send a signal to the stage or to one of its workers once a shard more is there."""
    before = len(receipts(folder))
    stage = start(folder)
    wait_for(lambda: len(receipts(folder)) > before, 120)
    workers = [
        pid for pid in stage.family() if "spawn_main" in " ".join(psutil.Process(pid).cmdline())
    ]
    assert workers
    os.kill(workers[0] if by_worker else stage.pid, number)
    stage.wait(120)
    wait_for(lambda: not stage.family())
    assert before < len(receipts(folder)) < 12
    assert not outputs(folder)
    return stage


def outputs(folder: Path) -> dict[Path, bytes]:
    files = [p for p in (folder / "data").rglob("*") if p.is_file() and p.name not in GIVEN]
    return {p.relative_to(folder): p.read_bytes() for p in files}


def receipts(folder: Path) -> list[Path]:
    # of the folder of shards alone: other entries are there for a moment
    jobs = [path for path in (folder / ".work" / "tokenize").glob("[!.]*") if path.is_dir()]
    return [receipt for job in jobs for receipt in job.glob("train-*.json")]


def prepare(folder: Path) -> Path:
    corpus = folder / "data" / "corpus.json"
    write_corpus(corpus, generate(1500))
    (folder / "params.yaml").write_text(PARAMS)
    return folder


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The folder of a run that is left alone."""
    folder = prepare(tmp_path_factory.mktemp("calm"))
    finish(folder)
    return folder


@pytest.mark.long
def test_killed_builds_resume_to_the_same_bytes(calm, tmp_path):
    killed = prepare(tmp_path)
    stage = kill(killed, True, signal.SIGKILL)
    assert stage.wait() == 2
    assert "Traceback" not in stage.said()
    assert "a worker process was killed" in stage.said().splitlines()[-1]
    assert len(stage.said().splitlines()[-1]) <= 300
    for number in (signal.SIGTERM, signal.SIGKILL):
        kill(killed, False, number)
    kept = receipts(killed)
    inodes = {path.stem: path.with_suffix(".bin").stat().st_ino for path in kept}
    torn = kept[0].with_suffix(".bin")
    torn.write_bytes(torn.read_bytes()[:-1])
    del inodes[torn.stem]

    finish(killed)
    assert outputs(killed) == outputs(calm)
    tokens = killed / "data" / "tokens"
    assert {name: (tokens / f"{name}.bin").stat().st_ino for name in inodes} == inodes


def test_fewer_shards_remove_stale_ones(calm, tmp_path):
    folder = shutil.copytree(calm, tmp_path / "fewer")
    (folder / "params.yaml").write_text(PARAMS.replace("12", "2"))
    finish(folder)
    names = sorted(path.name for path in (folder / "data" / "tokens").iterdir())
    assert names == ["manifest.json", "train-0.bin", "train-1.bin", "validation.bin"]
