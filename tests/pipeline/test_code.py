"""Keys of code change with what a stage runs, and with nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stages.code import STAGES
from tests.pipeline.workspace import ROOT, run

PROGRAM = """
import json
from shardlab.config.parameters import Parameters
from stages.code import code_keys
print(json.dumps(code_keys(Parameters().complete())))
"""
RUNS = """
codecs: [user_codecs.ternary]
strategies:
  mine: {engine: ddp, gradients: {codec: ternary}}
  plain: {engine: fsdp2}
  sparse: {engine: fsdp2, gradients: {codec: topk}}
  slide: {engine: slide}
"""
TIMED = {"timing", "trial"}
ENCODING = {*TIMED, "calibrate", "estimate"}


def keys(root: Path) -> dict[str, Any]:
    """Keys by stage, those of `train` as train/RUN."""
    known = json.loads(run(root, "python", "-c", PROGRAM).stdout)
    trained = {f"train/{name}": key for name, key in known.pop("train").items()}
    return {**known, **trained}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("code")
    for folder in ("shardlab", "stages", "csrc", "user_codecs"):
        shutil.copytree(ROOT / folder, root / folder)
    (root / "params.yaml").write_text(RUNS)
    return root


@pytest.fixture(scope="module")
def before(project: Path) -> dict[str, Any]:
    return keys(project)


CHANGES: dict[str, tuple[str, str, str, set[str]]] = {
    "the body of an imported function": (
        *("shardlab/report/tables.py", "return row[", "return None or row["),
        {"report"},
    ),
    "a docstring and a comment": (
        *("shardlab/report/tables.py", '"""', '"""Another word. '),
        set(),
    ),
    "an option of a command": ("shardlab/cli.py", "import ", "import csv, ", set()),
    "a template": (
        "shardlab/report/templates/report.html.j2",
        "<",
        " <",
        {"report", "collect"},
    ),
    "a module of one engine": (
        *("shardlab/engines/slide_schedule.py", "import ", "import os, "),
        {*TIMED, "train/slide"},
    ),
    "a codec that a registry loads": (
        *("shardlab/codecs/sparse.py", "import struct", "import struct, os"),
        {*ENCODING, "train/sparse"},
    ),
    "a codec of the user": (
        *("user_codecs/ternary.py", "import torch\n", "import torch, os\n"),
        {*ENCODING, "train/mine"},
    ),
    "a kernel": ("csrc/integers.cpp", "\n", "\n\n", {*ENCODING, "train/*"}),
}


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=() if i < 2 else pytest.mark.long) for i, name in enumerate(CHANGES)],
)
def test_a_change_of_code_alters_the_keys_of_what_runs_it(
    project: Path, before: dict[str, Any], change: str
) -> None:
    name, old, new, expected = CHANGES[change]
    path = project / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    try:
        after = keys(project)
    finally:
        path.write_text(text)
    changed = {key for key in after if after[key] != before[key]}
    trained = {key for key in after if key.startswith("train/")}
    assert (changed - trained | {"train/*"} if trained <= changed else changed) == expected


def test_the_machine_is_a_key_of_its_own(before: dict[str, Any]) -> None:
    assert {*STAGES} == before.keys() - {"machine"} - {k for k in before if "/" in k}
    assert ", torch " in before["machine"]


def test_import_of_shardlab_loads_no_module() -> None:
    """Every stage does it, so its public names are loaded on first use."""
    script = "import sys, shardlab; print([m for m in sys.modules if m.startswith('shardlab.')])"
    assert run(ROOT, "python", "-c", script).stdout == "[]\n"
