"""Scripts of others and their traces need the core dependencies alone."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.trace_factory import WORKER, event, label, step, write_rank

ROOT = Path(__file__).parents[2]
ABSENT = """
import sys

for name in sys.argv[1:]:
    sys.modules[name] = None  # as if it were not installed
"""
SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardlab

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
handle = shardlab.attach(model, gradients="int8")
optimizer = shardlab.LayerAdam(model.parameters())
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
assert handle.ledger.summary()["gradients"]["bytes_raw"] == 0  # one rank sends nothing
assert all(hasattr(shardlab, name) for name in dir(shardlab))
assert dir(shardlab) == sorted(shardlab.__all__)
"""


def packages(extra: str) -> list[str]:
    """Return the modules of an optional dependency's packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[\[>=<]", line)[0] for line in project["optional-dependencies"][extra]]
    core = [re.split(r"[\[>=<]", line)[0] for line in project["dependencies"]]
    return [name.replace("-", "_") for name in names if name not in (*core, "shardlab")]


def run_alone(script: str) -> str:
    """Return the output of a script in a process with the core dependencies alone."""
    absent = [name for extra in ("hf", "lab", "datasets") for name in packages(extra)]
    assert {"transformers", "pandas", "scipy", "orjson"} <= set(absent)
    command = [sys.executable, "-c", ABSENT + script, *absent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_attach_and_the_optimizer_work_with_the_core_dependencies() -> None:
    run_alone(SCRIPT)


def test_traces_are_broken_down_with_the_core_dependencies(tmp_path: Path) -> None:
    work = [event("aten::mm", 0, 500), label("gloo:all_reduce", 600, 900, WORKER)]
    write_rank(tmp_path / "0.json", [*step(1, 0, 1000), *work])
    rows, page = tmp_path / "rows.csv", tmp_path / "page.html"
    arguments = ["trace", str(tmp_path), "--csv", str(rows), "--html", str(page)]
    shown = run_alone(f"from shardlab.cli import main\nmain({arguments})")
    conclusion = "30 % of the step is exposed communication, mostly all_reduce; hiding it all gives"
    assert shown.splitlines()[-1].startswith(conclusion)
    assert conclusion in page.read_text() and len(rows.read_text().splitlines()) == 2
