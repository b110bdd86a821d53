"""Everything that the documents tell a reader to type works as it stands there."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardlab
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Params
from tests.pipeline.workspace import ROOT, Marked, run, wait_for
from tests.ranks import run_ranks

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRIED_ELSEWHERE = ["make run", "make test"]
"""by the pipeline that these tests begin with, and by CI"""


def fenced(language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    found = [re.findall(pattern, path.read_text(), re.DOTALL | re.M) for path in DOCUMENTS]
    return [block for blocks in found for block in blocks]


def commands() -> list[str]:
    lines = [line for block in fenced("sh") for line in block.splitlines()]
    typed = [line.partition("#")[0].strip() for line in lines]
    return list(dict.fromkeys(line for line in typed if line))


def test_commands_tried_elsewhere_are_documented_ones() -> None:
    assert set(TRIED_ELSEWHERE) <= set(commands())
    assert "make test" in (ROOT / ".ci/run").read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_command_works(workspace: Path) -> None:
    (workspace / ".venv").symlink_to(sys.prefix)
    for command in commands():
        if command in TRIED_ELSEWHERE:
            continue
        if command.startswith("tensorboard"):
            serve(workspace, *command.split(), "--port", "0")
            continue
        run(workspace, "bash", "-ec", command)
    assert (workspace / "overview.html").stat().st_size > 100_000


def serve(root: Path, *command: str) -> None:
    """Starts a server, and ends it once it has said where it can be reached."""
    server = Marked(root, *command)
    try:
        wait_for(lambda: "http://" in (root / "marked.log").read_text(), 120, "an address")
    finally:
        server.close()


@pytest.mark.parametrize("block", fenced("yaml"))
def test_every_excerpt_of_params_is_valid(block: str, tmp_path: Path) -> None:
    tree = yaml.safe_load((ROOT / "params.yaml").read_text())
    for section, values in yaml.safe_load(block).items():
        tree[section] |= values
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(tree))
    Parameters(path)(*Params.model_fields)


@pytest.mark.parametrize("block", fenced("python"))
def test_every_excerpt_of_python_runs(block: str) -> None:
    def on_rank(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        model, batch = fully_shard(nn.Linear(60, 60)), torch.ones(1, 60)
        # what the reader's script has made before
        names = {
            "torch": torch,
            "model": model,
            "batch": batch,
            "optimizer": torch.optim.SGD(model.parameters()),
            "states": [{}] * world_size,
            "world_size": world_size,
            "rank": rank,
        }
        exec(compile(block, "document", "exec"), names)
        if "register" in names:
            names["handle"] = shardlab.attach(model, names["Half"].name, minimum_size=0)
        if "handle" not in names:
            return {}
        model(batch).sum().backward()
        gradients = names["handle"].ledger.summary()["gradients"]
        assert gradients["collectives"] > 0 and gradients["compression_ratio"] > 1.9
        return {}

    run_ranks(2, on_rank)
