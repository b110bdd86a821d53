"""Command line of training: runs, restarts, mistakes, codecs of the user."""

import json
import shutil
from pathlib import Path

import pytest

import shardlab.train.run  # noqa: F401 - imported once, before the commands are forked
from shardlab.core.files import read_json, read_json_lines
from tests.commands import Command, free_port, typed
from tests.pipeline.workspace import ROOT

PARAMS = {
    "model": {"preset": "tiny"},
    "strategies": {"ddp": {"engine": "ddp"}, "fsdp2": {"engine": "fsdp2"}},
    "train": {
        "steps": 4,
        "batch_size": 2,
        "sequence_length": 16,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "untimed_steps": 2,
        "profiled_steps": 1,
    },
}


@pytest.fixture
def project(data: Path, tmp_path: Path) -> Path:
    """A folder to work in, with parameters in JSON."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "data").symlink_to(data)
    (project / "run.json").write_text(json.dumps(PARAMS, indent="\t"))
    return project


@pytest.fixture
def train(project: Path, tmp_path: Path):
    count = iter(range(100))

    def train(*arguments: str, environment: dict[str, str] | None = None) -> Command:
        folder = tmp_path / f"command{next(count)}"
        line = ("shardlab", "train", "--params", "run.json", *arguments)
        return typed(folder, project, *line, environment=environment)

    return train


def losses(project: Path, run: str, seed: int = 0) -> list[float]:
    folder = project / "results/train" / run / f"seed{seed}"
    return [event["loss"] for event in read_json_lines(folder / "events.jsonl")]


def two_nodes(train, *options: str) -> list[Command]:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [train(*options, environment={**master, "RANK": rank}) for rank in "01"]


@pytest.mark.long
def test_ranks_of_two_commands_match_one_command(train, project):
    """Also with another seed, from parameters in JSON and a number as JSON writes it."""
    options = ("--run", "fsdp2", "--seed", "3", "--set", "train.learning_rate=2e-3")
    alone = train(*options)
    assert alone.wait(60) == 0, alone.said()
    expected = losses(project, "fsdp2", 3)
    metrics = read_json(project / "results/train/fsdp2/seed3/metrics.json")
    assert (metrics["run"], metrics["seed"], metrics["world_size"]) == ("fsdp2", 3, 2)
    (project / "results/train/fsdp2/seed3/events.jsonl").unlink()

    nodes = two_nodes(train, *options)
    assert [node.wait(60) for node in nodes] == [0, 0], nodes[0].said()
    assert losses(project, "fsdp2", 3) == expected
    log = (project / "logs/train/fsdp2/3.log").read_text()
    assert log.count("done in") == 3


@pytest.fixture
def corpus(project: Path) -> Path:
    """The data of the project is a corpus without tokens."""
    made = project / "data"
    here = made.resolve()
    made.unlink()
    made.mkdir()
    for name in ("corpus.json", "source.json"):
        shutil.copy(here / name, made)
    return made


SECTIONS = ("data.validation_share=0.1", "tokenize.vocabulary=300", "tokenize.shards=3")
TOKENIZING = ["--run", "ddp", *(word for each in SECTIONS for word in ("--set", each))]


@pytest.mark.long
def test_rank_0_tokenizes_while_the_rank_of_another_node_waits(train, project, corpus):
    """Row B5 (attack 20): a corpus is enough."""
    nodes = two_nodes(train, *TOKENIZING)
    assert [node.wait(120) for node in nodes] == [0, 0], nodes[0].said()
    assert len(losses(project, "ddp")) == 4
    assert len(list((project / "data/tokens").glob("train-*.bin"))) == 3


def test_a_job_of_a_tool_never_builds(train, corpus):
    command = train(*TOKENIZING, environment={"DVC_STAGE": "train@0"})
    assert command.wait() == 2
    assert "data/tokens/manifest.json: no such file" in command.said()
    assert not (corpus / "tokens").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--run fsdp3", "strategies.fsdp3: missing from run.json; did you mean 'fsdp2'?"),
        ("--run ddp --seed -1", "--seed: input should be greater than or equal to 0 (found -1)"),
        ("ddp 0", "the following arguments are required: --run; see shardlab train --help"),
        ("--run ddp --max-restarts -1", "--max-restarts -1: expected 0 or more"),
    ],
)
def test_user_error_is_one_line(train, project, arguments, message):
    command = train(*arguments.split())
    assert command.wait() == 2
    assert command.said() == f"train: error: {message}\n"
    assert not (project / "results").exists()
    assert {path.name for path in project.parent.iterdir()} == {"project", "command0"}


CODEC = {"codec": "ternary:group=64", "error_feedback": True, "minimum_size": 64}


def test_a_run_is_trained_with_a_codec_in_plain_pytorch(data, tmp_path):
    project = tmp_path / "project"
    (project / "user_codecs").mkdir(parents=True)
    shutil.copy(ROOT / "user_codecs/ternary.py", project / "user_codecs")
    (project / "data").symlink_to(data)
    strategies = {"ternary": {"engine": "fsdp2", "gradients": CODEC}}
    params = {**PARAMS, "strategies": strategies, "codecs": ["user_codecs.ternary"]}
    (project / "params.yaml").write_text(json.dumps(params))
    command = typed(tmp_path / "command", project, "shardlab", "train", "--run", "ternary")
    assert command.wait() == 0, command.said()
    metrics = read_json(project / "results/train/ternary/seed0/metrics.json")
    assert metrics["strategy"]["gradients"]["codec"] == {"name": "ternary", "group": 64}
    assert losses(project, "ternary")
    # 2 bits, 16 bits of scale for 64 elements, and the envelope
    assert 14 < metrics["ledger"]["gradients"]["compression_ratio"] < 14.3
