"""Tokens that rank 0 builds while the other ranks wait outside of any collective."""

import glob
import multiprocessing
import os
import shutil
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_file, write_text
from shardlab.data.corpus.corpus_file import write_corpus
from shardlab.data.sources.corpus import generate
from shardlab.data.tokenize.tokenize import build_tokens, recipe_sha256
from shardlab.data.tokens.tokens import MANIFEST, open_split, read_manifest
from shardlab.experiment.schema import Tokenize
from shardlab.loop.plan import TokenPlan, build_once, ensure_tokens
from tests.ranks import run_ranks

PLAN = TokenPlan(0.1, Tokenize(vocabulary=300, shards=6))


@pytest.fixture
def folder(tmp_path):
    """A corpus without tokens."""
    write_corpus(tmp_path / "corpus.json", generate(600))
    return tmp_path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The same corpus with its tokens; not to be changed."""
    folder = tmp_path_factory.mktemp("built")
    write_corpus(folder / "corpus.json", generate(600))
    build(folder)
    return folder


@pytest.fixture
def ready(built, tmp_path):
    """A copy of both."""
    return shutil.copytree(built, tmp_path / "ready")


def build(folder):
    build_tokens(folder / "corpus.json", *PLAN, folder / ".work", folder)


def recipe(folder, plan=PLAN):
    return recipe_sha256(sha256_of_file(folder / "corpus.json"), *plan)


def contents(folder):
    return {path.name: path.read_bytes() for path in (folder / "tokens").iterdir()}


def test_ranks_wait_beyond_the_collective_timeout(folder):
    timeout_s = 2

    def slow():
        time.sleep(1.5 * timeout_s)
        build(folder)

    def on_rank(group):
        rank = dist.get_rank(group)
        build_once(folder / "tokens", recipe(folder), rank, slow, timeout_s)
        digest = bytes.fromhex(sha256_of_file(folder / "tokens" / MANIFEST))
        ranks = torch.ones(1)
        dist.all_reduce(ranks, group=group)
        return {"digest": torch.tensor(list(digest)), "ranks": ranks}

    results = run_ranks(3, on_rank, timeout_s=timeout_s)
    assert all(torch.equal(result["digest"], results[0]["digest"]) for result in results)
    assert all(result["ranks"] == 3 for result in results)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".work",
        "corpus.json",
        "tokenizer.json",
        "tokens",
    ]


def test_existing_tokens_are_not_rebuilt(ready):
    before = {path: path.stat().st_mtime_ns for path in (ready / "tokens").iterdir()}
    for rank in (0, 1):
        ensure_tokens(ready, PLAN, rank, patience_s=1)
    assert {path: path.stat().st_mtime_ns for path in (ready / "tokens").iterdir()} == before


@pytest.mark.parametrize(
    "other",
    [
        TokenPlan(0.2, PLAN.options),
        TokenPlan(0.1, Tokenize(vocabulary=310, shards=6)),
        TokenPlan(0.1, Tokenize(vocabulary=300, shards=5)),
    ],
)
def test_tokens_of_other_options_are_rebuilt(ready, other):
    with pytest.raises(UserError, match="without a sign of life from rank 0"):
        ensure_tokens(ready, other, 1, patience_s=0.3)
    ensure_tokens(ready, other, 0, patience_s=1)
    ensure_tokens(ready, other, 1, patience_s=1)
    assert read_manifest(ready / "tokens").recipe_sha256 == recipe(ready, other)


def test_tokens_of_another_corpus_or_tokenizer_are_rebuilt(ready):
    given = ready / "given.json"
    write_text(given, (ready / "tokenizer.json").read_text())
    plan = TokenPlan(0.1, Tokenize(tokenizer=str(given), vocabulary=None, shards=2))
    ensure_tokens(ready, plan, 0, patience_s=1)
    first = contents(ready)
    write_text(given, given.read_text().replace("<|endoftext|>", "<|end|>"))
    ensure_tokens(ready, plan, 0, patience_s=1)
    second = contents(ready)
    assert first.keys() == second.keys() and first[MANIFEST] != second[MANIFEST]
    write_corpus(ready / "corpus.json", generate(300))
    ensure_tokens(ready, plan, 0, patience_s=1)
    assert open_split(ready / "tokens", "train").documents < 300


def kill_rank_0(folder, processes):
    """As soon as it has finished a shard but not all of them."""
    shards = f"{folder}/.work/tokenize/*/train-*.json"
    # unlike Path.glob it passes over folders that are gone meanwhile
    while not any(glob.iglob(shards, include_hidden=True)):  # noqa: PTH207
        assert processes[0].exitcode is None
        time.sleep(0.001)
    os.kill(processes[0].pid, signal.SIGKILL)


def run_alone(folder, rank):
    """A rank that no launcher watches, as those of another node are."""
    try:
        ensure_tokens(folder, PLAN, rank, patience_s=2)
        write_text(folder / f"{rank}.said", "ready")
    except UserError as error:
        write_text(folder / f"{rank}.said", str(error))


def test_killed_build_ends_all_ranks_without_a_manifest(folder, built):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_alone, args=(folder, rank)) for rank in range(3)]
    for process in processes:
        process.start()
    kill_rank_0(folder, processes)
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0]
    for rank in (1, 2):
        said = (folder / f"{rank}.said").read_text()
        assert said.startswith(f"{folder}/tokens/{MANIFEST}: waited 2 s without a sign of life")
        assert "\n" not in said
    with pytest.raises(UserError, match="no such file"):
        open_split(folder / "tokens", "train")

    run_alone(folder, 0)
    run_alone(folder, 1)
    assert [(folder / f"{rank}.said").read_text() for rank in (0, 1)] == ["ready", "ready"]
    assert contents(folder) == contents(built)


def test_build_error_on_rank_0_ends_all_ranks(folder):
    (folder / "corpus.json").write_text("[\n")

    def on_rank(group):
        ensure_tokens(folder, PLAN, dist.get_rank(group), patience_s=3600)

    with pytest.raises(UserError, match=r"corpus\.json: byte 2: damaged"):
        run_ranks(2, on_rank)
    assert not list(folder.glob(".tokens*"))


def test_a_folder_without_a_corpus_is_refused(tmp_path):
    for rank in (0, 1):
        with pytest.raises(UserError, match=r"corpus\.json: there is none; make it"):
            ensure_tokens(tmp_path, PLAN, rank, patience_s=1)
