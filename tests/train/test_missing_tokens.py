"""Tokens that rank 0 builds while the commands of other ranks wait."""

import glob
import multiprocessing
import os
import signal
import time

import pytest

from shardlab.config.model_and_data import Tokenize
from shardlab.core.errors import UserError
from shardlab.core.files import write_text
from shardlab.data.corpus_file import write_corpus
from shardlab.data.sources import generate
from shardlab.data.tokenize import build_tokens
from shardlab.data.tokens import MANIFEST, open_split
from shardlab.train.missing_tokens import build_once

OPTIONS = Tokenize(tokenizer="train", vocabulary=300, shards=6)


@pytest.fixture
def folder(tmp_path):
    """A corpus without tokens."""
    write_corpus(tmp_path / "corpus.json", generate(600))
    return tmp_path


def build(folder):
    build_tokens(folder / "corpus.json", 0.1, OPTIONS, folder / ".work", folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in (folder / "tokens").iterdir()}


def run_alone(folder, rank, patience_s=2, before=lambda: None):
    """A rank that no launcher watches, as those of another node are."""

    def work():
        before()
        build(folder)

    try:
        build_once(folder / "tokens", rank, work, patience_s)
        write_text(folder / f"{rank}.said", "ready")
    except (UserError, ArithmeticError) as error:
        write_text(folder / f"{rank}.said", str(error))


def start(folder, *arguments):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_alone, args=(folder, r, *arguments)) for r in range(3)]
    for process in processes:
        process.start()
    return processes


def said(folder, processes):
    for process in processes:
        process.join(60)
        assert process.exitcode is not None
    return [path.read_text() for path in sorted(folder.glob("*.said"))]


@pytest.mark.long
def test_ranks_wait_for_a_build_that_takes_longer_than_their_patience(folder):
    processes = start(folder, 1, lambda: time.sleep(2.5))
    assert said(folder, processes) == ["ready"] * 3
    left = {path.name for path in folder.iterdir()} - {f"{rank}.said" for rank in range(3)}
    assert left == {".work", "corpus.json", "tokenizer.json", "tokens"}


def test_existing_tokens_are_not_rebuilt(folder):
    build(folder)
    for rank in (0, 1):
        build_once(folder / "tokens", rank, pytest.fail, patience_s=1)


def kill_rank_0(folder, processes):
    """As soon as it has finished a shard but not all of them."""
    shards = f"{folder}/.work/tokenize/*/train-*.json"
    # unlike Path.glob it passes over folders that are gone meanwhile
    while not any(glob.iglob(shards, include_hidden=True)):  # noqa: PTH207
        assert processes[0].exitcode is None
        time.sleep(0.001)
    os.kill(processes[0].pid, signal.SIGKILL)


@pytest.mark.long
def test_killed_build_ends_all_ranks_without_a_manifest(folder, tmp_path_factory):
    processes = start(folder)
    kill_rank_0(folder, processes)
    silent = f"{folder}/tokens/{MANIFEST}: waited 2 s without a sign of life from rank 0"
    found = said(folder, processes)
    assert len(found) == 2 and processes[0].exitcode == -signal.SIGKILL
    assert all(text.startswith(silent) and "\n" not in text for text in found)
    with pytest.raises(UserError, match="no such file"):
        open_split(folder / "tokens", "train")

    assert said(folder, start(folder)) == ["ready"] * 3
    other = tmp_path_factory.mktemp("built")
    write_corpus(other / "corpus.json", generate(600))
    build(other)
    assert contents(folder) == contents(other)


@pytest.mark.long
def test_failed_build_ends_all_ranks_at_once_and_a_later_one_is_waited_for(folder):
    def fail():
        time.sleep(1)  # the others are waiting by then
        raise ArithmeticError("its own error")

    processes = start(folder, 3600, fail)
    other = f"{folder}/tokens: rank 0 could not build it: see what rank 0 says"
    assert said(folder, processes) == ["its own error", other, other]
    assert said(folder, start(folder)) == ["ready"] * 3
    assert not list(folder.glob(".tokens*"))
