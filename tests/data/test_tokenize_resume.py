import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardlab.data.corpus.corpus_file import write_corpus
from shardlab.data.sources.corpus import generate

ROOT = Path(__file__).parents[2]
PARAMS = """
data: {source: synthetic, validation_share: 0.05}
tokenize: {tokenizer: train, vocabulary: 300, shards: 12}
"""


def start(folder):
    return subprocess.Popen(
        [sys.executable, "-m", "stages.tokenize"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(folder):
    stage = start(folder)
    _, errors = stage.communicate(timeout=120)
    assert stage.returncode == 0, errors


def outputs(folder):
    files = [p for p in (folder / "data").rglob("*") if p.is_file() and p.name != "corpus.json"]
    return {p.relative_to(folder): p.read_bytes() for p in files}


def receipts(folder):
    # of the folder of shards alone: other entries are there for a moment
    jobs = [path for path in (folder / ".work" / "tokenize").glob("[!.]*") if path.is_dir()]
    return [receipt for job in jobs for receipt in job.glob("train-*.json")]


def prepare(folder):
    write_corpus(folder / "data" / "corpus.json", generate(1500))
    (folder / "params.yaml").write_text(PARAMS)
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The outputs of a run that is left alone."""
    calm = prepare(tmp_path_factory.mktemp("calm"))
    finish(calm)
    return outputs(calm)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_build_resumes_to_the_same_bytes(expected, tmp_path, number):
    killed = prepare(tmp_path)
    stage = start(killed)
    while not receipts(killed):
        assert stage.poll() is None
        time.sleep(0.001)
    children = psutil.Process(stage.pid).children(recursive=True)
    stage.send_signal(number)
    stage.communicate()
    assert children
    assert not psutil.wait_procs(children, timeout=20)[1]
    kept = receipts(killed)
    assert 0 < len(kept) < 12
    assert not outputs(killed)
    inodes = {path.stem: path.with_suffix(".bin").stat().st_ino for path in kept}
    torn = kept[0].with_suffix(".bin")
    torn.write_bytes(torn.read_bytes()[:-1])
    del inodes[torn.stem]

    finish(killed)
    assert outputs(killed) == expected
    tokens = killed / "data" / "tokens"
    assert {name: (tokens / f"{name}.bin").stat().st_ino for name in inodes} == inodes


def test_fewer_shards_remove_stale_ones(tmp_path):
    folder = prepare(tmp_path)
    finish(folder)
    (folder / "params.yaml").write_text(PARAMS.replace("12", "2"))
    finish(folder)
    names = sorted(path.name for path in (folder / "data" / "tokens").iterdir())
    assert names == ["manifest.json", "train-0.bin", "train-1.bin", "validation.bin"]
