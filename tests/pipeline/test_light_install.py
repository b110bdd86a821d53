"""Scripts of others need the core dependencies alone."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys

for name in sys.argv[1:]:
    sys.modules[name] = None  # as if it were not installed
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
assert set(shardlab.__all__) <= set(dir(shardlab))
"""


def packages(extra: str) -> list[str]:
    """Return the modules of an optional dependency's packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[\[>=<]", line)[0] for line in project["optional-dependencies"][extra]]
    core = [re.split(r"[\[>=<]", line)[0] for line in project["dependencies"]]
    return [name.replace("-", "_") for name in names if name not in (*core, "shardlab")]


@pytest.mark.long
def test_attach_and_the_optimizer_work_with_the_core_dependencies() -> None:
    absent = [name for extra in ("hf", "lab", "datasets") for name in packages(extra)]
    assert {"transformers", "pandas", "scipy"} <= set(absent)
    command = [sys.executable, "-c", SCRIPT, *absent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
